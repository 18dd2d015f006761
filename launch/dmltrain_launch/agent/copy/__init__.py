"""Copying files to this host: what differs, where it may go, and what was copied before."""
