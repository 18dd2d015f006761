"""A job from its start to its end: preparation, supervision, and the I/O around both."""
