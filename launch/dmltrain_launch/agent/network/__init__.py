"""Whether the hosts of a job reach each other, and how fast."""
