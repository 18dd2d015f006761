"""Remove what was once copied to a folder and is gone from its source, unless it has changed since the copy."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Collection, Generator, Mapping

from dmltrain_launch.agent.copy.copied import FOLDER, Copied, state
from dmltrain_launch.agent.copy.destination import Destination


def unannounced(copied: Copied, announced: Mapping[bytes, str]) -> tuple[list[bytes], list[bytes]]:
    """Of the listed paths, those that are not `announced` (path -> kind): they may be left out or gone from the source.
    And those that are announced as something else, a folder in place of a file for example: they are gone."""
    missing = [path for path in copied.entries if path not in announced]
    folders = {path for path, states in copied.entries.items() if states[-1:] == (FOLDER,)}
    other = [path for path in copied.entries if path in announced and (path in folders) != (announced[path] == FOLDER)]
    return missing, other


def remove(
    destination: Destination, copied: Copied, gone: Collection[bytes]
) -> Generator[None, None, tuple[list[bytes], list[bytes]]]:
    """Remove these paths, and forget them. Returns the files and links that were removed, and what has changed since
    the copy, which stays. Folders go if they are empty. Yields after at most one file system call or READ_BYTES."""
    removed, changed = [], []
    for path in sorted(gone, reverse=True):  # a folder after its contents
        yield
        states = copied.entries.pop(path, ())
        found = _stat(destination, path)
        if found is None:
            continue
        try:
            if (yield from state(destination, path, found)) not in states:
                changed.append(path)
            elif stat.S_ISDIR(found.st_mode):
                with contextlib.suppress(OSError):  # it is not empty
                    destination.remove_folder(path)
            else:
                destination.remove(path)
                removed.append(path)
        except FileNotFoundError:  # another agent that shares the folder was faster
            continue
    return removed[::-1], changed[::-1]


def _stat(destination: Destination, path: bytes) -> os.stat_result | None:
    try:
        return destination.stat(path)
    except OSError:  # a link or a file has taken the place of a folder above it
        return None
