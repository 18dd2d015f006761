"""How the programs of this package exit: one line for a user error, and always an exit code."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from dmltrain.base.safe_text import open_missing_streams, safe_lines
from dmltrain_launch import LaunchError, as_utf8
from dmltrain_launch.run.supervisor.limit import FAULT_CODE

FILE = "dmltrain-file"  # begins the line of a file that comes with a job's output


def end_with(name: str, act: Callable[[list[str]], int], argv: Sequence[str] | None = None) -> NoReturn:
    """Run `act` on the command line of the program `name`, and exit with its code."""
    open_missing_streams()
    try:
        code = act([as_utf8(word) for word in (sys.argv[1:] if argv is None else argv)])
    except LaunchError as error:
        say(f"{name}: error: {error}")
        code = error.code
    except KeyboardInterrupt:  # before the job started
        code = 130
    except BrokenPipeError:  # the reader closed the pipe: `--dry-run ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else Python reports an error when it flushes at exit
        code = 128 + signal.SIGPIPE
    except Exception:  # a bug of the launcher; the agents end the job when its heartbeats stop
        import traceback

        traceback.print_exc()
        code = FAULT_CODE
    sys.exit(code)


def show(line: str) -> None:
    """Print lines to standard output. What others have written in them does not control the terminal."""
    print(safe_lines(line), flush=True)


def say(line: str) -> None:
    """Print one line to standard error, in one piece: another thread prints the output of processes. Ignore a closed
    terminal or pipe. What others have written in it neither controls the terminal nor passes for a file (see
    `dmltrain_launch.commands.follow`)."""
    line = re.sub(rf"(?m)^(?={FILE})", " ", safe_lines(line))
    try:
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()
    except (OSError, UnicodeEncodeError):
        with contextlib.suppress(OSError):
            os.write(2, line.encode("ascii", "backslashreplace") + b"\n")
