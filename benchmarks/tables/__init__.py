"""Computes the figures of a contest from its turns, as JSON values and as tables."""
