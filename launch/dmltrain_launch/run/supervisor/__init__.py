"""The parts of the supervisor (supervise.py) and the values that it gets and returns. Pure."""
