"""Start a job: one command line -> processes on hosts, their output, their end. Imports nothing of `dmltrain`."""

import os

NAME = "dmltrain-launch"


class LaunchError(Exception):
    """A user's mistake or a host's refusal; the message is complete and `code` is the launcher's exit code."""

    def __init__(self, message: str, code: int = 2):
        super().__init__(message)
        self.code = code


def as_utf8(text: str) -> str:
    """What the system gave as bytes, as UTF-8 whatever the locale; bytes that are not UTF-8 survive as surrogates."""
    return os.fsencode(text).decode("utf-8", "surrogateescape")


def version() -> str:
    """The installed project's version; "unknown" when it runs from a folder that was never installed."""
    from importlib import metadata

    try:
        return metadata.version("dmltrain")
    except metadata.PackageNotFoundError:
        return "unknown"
