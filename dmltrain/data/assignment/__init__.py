"""Which worker gets which samples in which step. Pure."""
