"""Contests between systems that carry the same gradients: who takes part, where, with which workload, turn by turn."""
