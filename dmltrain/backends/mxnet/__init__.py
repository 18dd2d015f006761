"""MXNet 1.9.1: the trainer, MXNet's kvstores and servers, and compatibility with today's NumPy and Python."""
