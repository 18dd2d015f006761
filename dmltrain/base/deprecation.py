"""The warning that something of the public interface will go (docs/deprecations.md has the rules and the list)."""

import warnings

KEPT = 2  # minor versions that have both


def deprecated(old: str, new: str, since: str, level: int = 1) -> None:
    """Warn the user of `old`, a name or an option, that `new` replaces it.

    `since`: the version that warns first, such as "0.5". `level`: how many calls above the caller the user's line is.
    A FutureWarning, because Python hides a DeprecationWarning from users of programs.
    """
    text = f"{old} is deprecated since dmltrain {since} and will go with {end(since)}: use {new}"
    warnings.warn(text, FutureWarning, stacklevel=level + 2)


def end(since: str) -> str:
    """The first version without it: "0.7" for "0.5"."""
    major, minor = since.split(".")
    return f"{major}.{int(minor) + KEPT}"
