"""The decisions about a job: events and the time in, actions out. Pure; session.py does the I/O."""
