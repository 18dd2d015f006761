"""Channels through mpirun: a bridge on each host calls the launcher back over TLS."""
