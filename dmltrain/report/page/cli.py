"""The program dmltrain-report; no other module of this package prints or writes.

Exit codes: 0 success; 2 an error in the input or output (what could be read is still in the page).
"""

from __future__ import annotations

import argparse
import os
import stat
import sys
from collections.abc import Sequence
from pathlib import Path

from dmltrain.base import whole_file
from dmltrain.base.errors import UserError
from dmltrain.base.safe_text import one_line, printed
from dmltrain.report import dialect
from dmltrain.report.page import document, source
from dmltrain.version import __version__

NAME = "dmltrain-report"
LIMIT = 2_000_000  # bytes of a page; a larger one is remarked
_EXAMPLES = """examples:
  dmltrain-report logs/r20                             the run in a folder -> report.html
  dmltrain-report logs/r20 logs/r50 old.log -o r.html  three runs, to compare
  dmltrain-report logs/experiments/multi-gpu           an experiment: its table and plots, then its runs
"""


@printed()
def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit code."""
    arguments = _arguments(argv)
    try:
        _check(arguments.output)
        sources = source.read(arguments.logs)
        if sources.runs or sources.experiments:
            _write(arguments.output, sources)
    except UserError as error:
        _say("error", str(error))
        return 2
    except KeyboardInterrupt:
        return 130
    for note in sources.notes:
        _say("note", note)
    for fault in sources.faults:
        _say("error", fault)
    return 2 if sources.faults else 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=NAME,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=_EXAMPLES,
        description="One HTML page from the logs of training runs: tables, curves, times, what happened. It needs no "
        f"network. The logs are those of {dialect.programs('and')}.",
    )
    parser.add_argument(
        "logs", nargs="+", metavar="LOG", help="a log file, a folder with the logs of one run, or that of an experiment"
    )
    parser.add_argument("-o", "--output", default="report.html", metavar="FILE", help="the page (default: report.html)")
    return parser.parse_args(argv)


def _check(output: str) -> None:
    """Refuse to replace what is not a page: a log that was named by mistake must not be lost."""
    try:
        if not stat.S_ISREG(os.stat(output).st_mode) and not os.path.isdir(output):
            raise UserError(f"{output} is no regular file: choose another name with -o")
        with open(output, "rb") as file:
            start = file.read(400)
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise _unwritable(output, error) from None
    if start and f'content="{document.GENERATOR}"'.encode() not in start:
        raise UserError(f"{output} exists and is not a page of {NAME}: remove it, or choose another name with -o")


def _write(output: str, sources: source.Sources) -> None:
    try:
        folder = os.path.dirname(output) or "."
        page = document.document(sources, folder, __version__).encode()
        whole_file.write(Path(output), page)
    except (OSError, ValueError) as error:
        raise _unwritable(output, error) from None
    count = len(sources.runs)
    print(f"{one_line(output)}: {count} run{'s' * (count != 1)}, {len(page) / 1e6:.1f} MB")
    if len(page) > LIMIT:
        _say("note", f"the page is larger than {LIMIT / 1e6:.0f} MB: name fewer runs for a smaller one")


def _unwritable(output: str, error: OSError | ValueError) -> UserError:
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return UserError(f"{output} cannot be written: {reason}")


def _say(kind: str, text: str) -> None:
    print(f"{NAME}: {kind}: {one_line(text)}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
