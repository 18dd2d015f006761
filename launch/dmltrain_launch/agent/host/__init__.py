"""What this host has, and how much of it is in use."""
