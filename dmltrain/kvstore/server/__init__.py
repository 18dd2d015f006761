"""A server: a pure core that sums or steps, and the sockets, threads and memory around it."""
