"""Which exits of a program skip Python's exit handlers, in which MXNet's store would wait for the others."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
from dmltrain.backends.mxnet.compat import exit as mxnet_exit
class Store:
    def __del__(self):
        print("waits for all", flush=True)
mxnet_exit.watch()
store = Store()
print("printed", end=" ")
"""


def end(how: str, role: str) -> tuple[int, str, str]:
    """The exit code, what was printed, and the last line of errors."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "DMLC_ROLE": role}
    done = subprocess.run([sys.executable, "-c", PROGRAM + how], env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout.strip(), done.stderr.strip().rpartition("\n")[2]


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        ("raise ValueError('wrong')", 1, "ValueError: wrong"),
        ("sys.exit(7)", 7, ""),
        ("exit(7)", 7, ""),
        ("def main():\n    try: sys.exit(7)\n    except SystemExit as ending: raise\nmain()", 7, ""),
        ("def main():\n    try: sys.exit(3)\n    except SystemExit as first: sys.exit(first.code + 4)\nmain()", 7, ""),
        ("sys.exit('wrong')", 1, "wrong"),
        ("import argparse; argparse.ArgumentParser().error('unknown')", 2, "-c: error: unknown"),
        ("sys.stdout.flush(); sys.stdout.close(); sys.exit(3)", 3, ""),
    ],
)
def test_a_failed_worker_exits_at_once(how, code, said):
    assert end(how, "worker") == (code, "printed", said)


@pytest.mark.parametrize(
    ("how", "code", "role"),
    [
        ("", 0, "worker"),
        ("sys.exit()", 0, "worker"),
        ("sys.exit(0)", 0, "worker"),
        ("try: sys.exit(3)\nexcept SystemExit: sys.exit(0)", 0, "worker"),
        ("try: sys.exit(3)\nexcept SystemExit: pass", 0, "worker"),
        ("import threading\nthreading.Thread(target=sys.exit, args=[3]).start()", 0, "worker"),
        ("sys.exit(7)", 7, "server"),
        ("sys.exit(7)", 7, "scheduler"),
    ],
)
def test_a_successful_worker_waits_for_all_and_other_roles_are_left_alone(how, code, role):
    assert end(how, role) == (code, "printed waits for all", "")
