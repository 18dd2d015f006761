"""What a run, or several, came to: summaries, comparisons, and how sure they are."""
