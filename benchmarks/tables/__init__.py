"""From the turns of a contest to its figures, as JSON values and as tables."""
