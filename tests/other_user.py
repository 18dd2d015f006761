"""Programs of other users of this machine, for attacks: real processes of USER and OTHER_USER.

The numbers need no accounts. Only root can start such processes, so elsewhere these tests are skipped.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

USER, OTHER_USER = 2001, 2002  # who runs the job, and another user of the same machine


def as_user(number: int, *command: object) -> list[str]:
    """The command that runs `command` as this user, without other groups."""
    if os.geteuid() or not shutil.which("setpriv"):
        pytest.skip("processes of other users need root and setpriv (Debian, Ubuntu: util-linux)")
    return ["setpriv", "--reuid", str(number), "--regid", str(number), "--clear-groups", *map(str, command)]


def shell(number: int, script: str, *arguments: object) -> str:
    """Run a shell script as this user; what it printed."""
    command = as_user(number, "sh", "-ec", script, "sh", *arguments)
    done = subprocess.run(command, cwd="/", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@cache
def python() -> str:
    """A Python that other users can start: this one may lie in a private folder.

    The shell is there because setpriv itself still has root's right to start any program.
    """
    start = 'exec "$0" -I -S -c "import json"'
    for each in (os.path.realpath(sys.executable), "/usr/bin/python3", "/usr/local/bin/python3"):
        try:
            if not subprocess.run(as_user(USER, "sh", "-c", start, each), cwd="/", capture_output=True).returncode:
                return each
        except OSError:
            continue
    pytest.skip("no Python that other users can start: install python3 outside of a private folder")


@contextmanager
def sticky_folder() -> Iterator[Path]:
    """A folder like /tmp, in which every user can create files. pytest's own folders are private."""
    with tempfile.TemporaryDirectory(prefix="dmltrain-test-", dir="/tmp") as name:
        os.chmod(name, 0o1777)
        yield Path(name)
