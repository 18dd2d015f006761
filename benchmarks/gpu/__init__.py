"""The stages of first_minutes.py."""
