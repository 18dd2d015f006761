"""Planned changes of a running elastic job: workers and hosts that come and go, and new settings. Pure."""
