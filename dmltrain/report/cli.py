"""The program dmltrain-parse; no other module of this package prints.

Exit codes: 0 success; 2 an error in the input (the rest is still shown); 141 the reader of the output has closed it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from dmltrain.base.safe_text import one_line, printed, safe_lines
from dmltrain.report import actions
from dmltrain.report.actions import ActionResult
from dmltrain.report.command_line import arguments
from dmltrain.report.follow import follow

_AT_ONCE = 1 << 20  # letters of a long table


@printed()
def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit code."""
    try:
        given = arguments(argv)
        return _report(follow(given, _write, _say) if given.follow else _outcome(given))
    except BrokenPipeError:
        return 141
    except KeyboardInterrupt:
        return 130


def _outcome(given: argparse.Namespace) -> ActionResult:
    if given.compare:
        return actions.comparison(given)
    return actions.summaries(given) if given.summary else actions.epochs(given)


def _report(outcome: ActionResult) -> int:
    faults = [*outcome.faults, *_write(outcome.text)]
    for note in outcome.notes:
        _say("note", note)
    for fault in faults:
        _say("error", fault)
    return 2 if faults else 0


def _write(text: str) -> list[str]:
    """Write all of `text` to standard output; an unbuffered stream (python -u) may accept less at a time."""
    if not hasattr(sys.stdout, "buffer"):  # not a file, but an object that collects text
        sys.stdout.write(text)
        return []
    try:
        for start in range(0, len(text), _AT_ONCE):
            part = safe_lines(text[start : start + _AT_ONCE])
            rest = memoryview(part.encode(sys.stdout.encoding or "utf-8", "backslashreplace"))
            while rest:
                rest = rest[sys.stdout.buffer.write(rest) :]
        sys.stdout.buffer.flush()  # before the messages, if both go to the same file
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # discards the rest of the buffer
        if isinstance(error, BrokenPipeError):
            raise
        return [f"the report cannot be written: {error.strerror}"]
    return []


def _say(kind: str, text: str) -> None:
    print(f"dmltrain-parse: {kind}: {one_line(text)}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
