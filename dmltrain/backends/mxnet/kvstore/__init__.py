"""MXNet's kvstores with dmltrain's interface."""
