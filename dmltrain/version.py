"""The version of dmltrain."""

__version__ = "0.5.0"
