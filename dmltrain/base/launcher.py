"""Finds the launcher. It is a separate program: dmltrain imports nothing of it."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from dmltrain.base.errors import UserError

LAUNCHER = "dmltrain-launch"


def launcher() -> str:
    """The path of dmltrain-launch beside this program or this Python, else on the path. UserError if there is none."""
    beside = (Path(program).parent / LAUNCHER for program in (sys.argv[0], sys.executable) if "/" in program)
    path_of_launcher = next((str(path) for path in beside if os.access(path, os.X_OK)), None) or shutil.which(LAUNCHER)
    if not path_of_launcher:
        raise UserError(f"{LAUNCHER} is neither beside {sys.executable} nor on the path: install dmltrain there")
    return path_of_launcher
