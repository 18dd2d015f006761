"""A server's links to workers and relays: between their frames and the pure core."""
