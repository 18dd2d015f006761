"""The version of dmltrain."""

__version__ = "0.4.0"
