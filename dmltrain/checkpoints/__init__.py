"""Checkpoint files: how one is written and sealed, how all workers agree on one, and weights of other runs."""
