"""Run a job from start to end: preparation, supervision, and the I/O around both."""
