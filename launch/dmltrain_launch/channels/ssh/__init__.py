"""Channels over SSH: paramiko's, and the system's own ssh command."""
