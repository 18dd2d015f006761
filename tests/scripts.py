"""Executable Python scripts that tests put where a program or an interpreter is expected."""

import shlex
import sys
from pathlib import Path


def executable(path: Path, source: str, flags: str = "") -> Path:
    """Make `path` a script that this Python runs, with `flags`, as `source`.

    A `#!` line cannot name a Python whose path has a space. So a shell reads the first two lines, and starts Python;
    Python takes these lines for a string. This is how pip writes such scripts.
    """
    path.write_text(f"#!/bin/sh\n'''exec' {shlex.quote(sys.executable)} {flags} \"$0\" \"$@\"\n' '''\n{source}")
    path.chmod(0o755)
    return path


def shell_script(path: Path, text: str) -> Path:
    """Make `path` an executable script of the shell."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path
