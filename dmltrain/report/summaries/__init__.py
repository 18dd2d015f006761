"""Summaries of runs, comparisons, and how certain their differences are."""
