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
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "DMLC_ROLE": role}
    done = subprocess.run([sys.executable, "-c", PROGRAM + how], env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout.strip(), done.stderr.strip().splitlines()[-1:] and done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        ("raise ValueError('wrong')", 1, "ValueError: wrong"),
        ("sys.exit(7)", 7, []),
        ("exit(7)", 7, []),
        ("def main():\n    try: sys.exit(7)\n    except SystemExit as ending: raise\nmain()", 7, []),
        ("def main():\n    try: sys.exit(3)\n    except SystemExit as first: sys.exit(first.code + 4)\nmain()", 7, []),
        ("sys.exit('wrong')", 1, "wrong"),
        (
            "import argparse; argparse.ArgumentParser(prog='x').parse_args(['-y'])",
            2,
            "x: error: unrecognized arguments: -y",
        ),
        ("sys.stdout.flush(); sys.stdout.close(); sys.exit(3)", 3, []),
    ],
)
def test_a_failed_worker_exits_at_once(how, code, said):
    assert end(how, "worker") == (code, "printed", said)


@pytest.mark.parametrize(
    "how",
    [
        "",
        "sys.exit()",
        "sys.exit(0)",
        "try: sys.exit(3)\nexcept SystemExit: sys.exit(0)",
        "try: sys.exit(3)\nexcept SystemExit: pass",
        "import threading\nthreading.Thread(target=sys.exit, args=[3]).start()",
    ],
)
def test_a_successful_worker_waits_for_all(how):
    assert end(how, "worker") == (0, "printed waits for all", [])


@pytest.mark.parametrize("role", ["server", "scheduler"])
def test_other_roles_are_left_alone(role):
    assert end("sys.exit(7)", role) == (7, "printed waits for all", [])
