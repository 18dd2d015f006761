"""Start a job: one command line -> processes on hosts, their output, their end. Imports nothing of `dmltrain`."""


class LaunchError(Exception):
    """A user's mistake or a host's refusal; the message is complete and `code` is the launcher's exit code."""

    def __init__(self, message: str, code: int = 2):
        super().__init__(message)
        self.code = code


def version() -> str:
    """The installed project's version; "unknown" when it runs from a folder that was never installed."""
    from importlib import metadata

    try:
        return metadata.version("dmltrain")
    except metadata.PackageNotFoundError:
        return "unknown"
