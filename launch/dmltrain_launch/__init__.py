"""Start jobs: run any program as a set of processes on hosts. Imports three modules of `dmltrain.base` only."""

import os

NAME = "dmltrain-launch"


class LaunchError(Exception):
    """A user error or a failure of a host. The message is complete; `code` is the launcher's exit code."""

    def __init__(self, message: str, code: int = 2):
        super().__init__(message)
        self.code = code


def as_utf8(text: str) -> str:
    """Decode text of the system as UTF-8 in any locale. Bytes that are not UTF-8 become surrogates."""
    return os.fsencode(text).decode("utf-8", "surrogateescape")


def version() -> str:
    """The installed version; "unknown" if the package is not installed."""
    from importlib import metadata

    try:
        return metadata.version("dmltrain")
    except metadata.PackageNotFoundError:
        return "unknown"
