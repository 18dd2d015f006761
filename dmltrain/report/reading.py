"""A path -> the run or runs in its logs.

A file is one run, or several if Keras trained several times. A folder is one run: *.log files with epochs are its
workers, and the others (servers, scheduler) are ignored. `-` is standard input.
"""

from __future__ import annotations

import os
import re
import stat
import sys
from pathlib import Path
from typing import BinaryIO

from dmltrain.errors import UserError
from dmltrain.report.block import Block, blocks
from dmltrain.report.dialect import DIALECTS, programs
from dmltrain.report.run import Found, Run, merge

_SHAPES = f"`Epoch[k] Train-accuracy=...`, or an epoch as written by {programs('or')}"


def read(path: str) -> list[Run]:
    """The runs of `path`, at least one; `Run.faults` has their errors. UserError if the path cannot be read."""
    if path == "-":
        return _file_runs(path, sys.stdin.buffer)
    if os.path.isdir(path):
        return [_folder_run(path)]
    try:
        with open(path, "rb") as stream:
            return _file_runs(path, stream)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise UserError(_unreadable(path, error)) from None


def _file_runs(path: str, stream: BinaryIO) -> list[Run]:
    found, fault = scan(stream)
    if not found:
        return [Run(path, (path,), faults=(f"{path}: {fault}",))]
    several = len(found) > 1
    return [merge(path, [(path, one)], part if several else 0) for part, one in enumerate(found, 1)]


def scan(stream: BinaryIO) -> tuple[list[Found], str]:
    """The runs in a log; if there is none, the reason. Passes on the stream's OSError."""
    dialects = [dialect() for dialect in DIALECTS]
    first: Block | None = None
    for block in blocks(stream):
        first = first or block
        any(dialect.feed(block) for dialect in dialects)
    found = next((found for dialect in dialects if (found := dialect.found())), [])
    return found, "" if found else _nothing(first)


def _nothing(first: Block | None) -> str:
    if first is None:
        return "the file is empty: expected a training log; has the training started?"
    if first.data.startswith(b"\x1f\x8b"):
        return "compressed with gzip: unpack it first (gunzip -c FILE | dmltrain-parse -)"
    kind = "a binary file, not a log" if b"\0" in first.data[:4096] else "no epoch in it"
    return f"{kind}: expected lines such as {_SHAPES}"


def _unreadable(path: str, error: OSError | ValueError) -> str:
    reason = (error.strerror if isinstance(error, OSError) else str(error)) or str(error)
    return f"{path}: cannot be read: {reason}"


# ---- folders --------------------------------------------------------------------------------------------------------


def _folder_run(path: str) -> Run:
    names = sorted(_names(path), key=_natural)
    files: list[tuple[str, Found]] = []
    faults: list[str] = []
    without: list[str] = []
    for name in (name for name in names if name.endswith(".log")):
        log = os.path.join(path, name)
        try:
            found = _scan_file(log)
        except OSError as error:
            faults.append(_unreadable(log, error))
            continue
        files += [(log, one) for one in found]
        if not found:
            without.append(name)
    if not files and not faults:
        faults.append(_no_logs(path, names, without))
    return merge(path, files, faults=faults, notes=_unlike(path, [os.path.basename(log) for log, _ in files]))


def _names(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError as error:
        raise UserError(_unreadable(path, error)) from None


def _scan_file(log: str) -> list[Found]:
    """Read a regular file only: opening a fifo named *.log would block."""
    if not stat.S_ISREG(os.stat(log).st_mode):
        return []
    with open(log, "rb") as stream:
        return scan(stream)[0]


def _unlike(path: str, logs: list[str]) -> list[str]:
    """A note if names differ in more than numbers: the logs may not belong to the workers of one run."""
    if len({re.sub(r"[0-9]+", "", log) for log in logs}) <= 1:
        return []
    return [f"{path}: {_some(logs)} are treated as the workers of one run; name the files to see them side by side"]


def _no_logs(path: str, names: list[str], without: list[str]) -> str:
    runs = [str(Path(path, name)) for name in names if any(Path(path, name).glob("*.log"))]
    if runs:
        return f"{path}: a folder of several runs: name one or more of {_some(runs)}"
    if without:
        return f"{path}: no epoch in any of its logs ({_some(without)}): expected lines such as {_SHAPES}"
    return f"{path}: no *.log file in this folder: expected the folder of one run, such as logs/JOB"


def _some(names: list[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _natural(name: str) -> list[tuple[int, str]]:
    """worker-2 before worker-10."""
    parts = re.split(r"([0-9]{1,18})", name)
    return [(int(part), "") if place % 2 else (-1, part) for place, part in enumerate(parts)]
