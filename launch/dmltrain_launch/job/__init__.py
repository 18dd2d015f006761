"""Jobs as values: hosts, roles, placement, every process with its argv and environment. Pure."""
