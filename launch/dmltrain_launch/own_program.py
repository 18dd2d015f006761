"""Starts this project's own modules as programs that import nothing from the current folder.

`python -m` and `python -c` search the current folder first. It may be another user's, such as /tmp, or have a
`launch.py` of its own. `-P` needs Python 3.11, and `-I` ignores PYTHONPATH, so the program removes the folder itself:
`sys` is built in, and nothing else is imported before.
"""

from __future__ import annotations

START = (
    "import sys; sys.path = [each for each in sys.path if each]; import runpy; "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


def own_program(python: str, module: str) -> list[str]:
    """The command, on one line, to which the module's arguments are added."""
    return [python, "-c", START, module]
