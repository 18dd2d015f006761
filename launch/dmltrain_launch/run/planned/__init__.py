"""Planned changes of a running job: workers and hosts that come and go, and new settings. Pure."""
