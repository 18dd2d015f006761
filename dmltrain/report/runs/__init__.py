"""A run as values, and what is read of it besides its epochs: lines at the start, arguments, job.json."""
