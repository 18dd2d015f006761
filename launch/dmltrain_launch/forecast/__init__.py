"""What speed-up to expect of a job before it runs."""
