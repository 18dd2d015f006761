"""Runs the launcher on Ray's head, as the command of a job of Ray, and prints its output so that Ray can carry it.

    dmltrain_launch.clusters.ray.inside WORD...

Ray reads what a job prints as UTF-8 and as lines; programs may print anything. So the output is escaped: `decoded` is
the inverse. Its first line is BEGIN, as Ray has printed lines of its own before. It ignores SIGTERM: `ray job stop`
sends that to all processes of the job, and the launcher is to end them in order.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence

from dmltrain_launch.own_program import own_program

BEGIN = "dmltrain-begin"
ESCAPE = re.compile(rb"\\([\\r]|x[0-9a-f]{2})")


def encoded(line: bytes) -> str:
    """Text without the ends of lines, of any bytes without b"\\n"."""
    return line.replace(b"\\", b"\\\\").replace(b"\r", b"\\r").decode("utf-8", "backslashreplace")


def decoded(line: bytes) -> bytes:
    """The inverse of `encoded`, of its UTF-8."""

    def one(match: re.Match[bytes]) -> bytes:
        escaped = match[1]
        return {b"\\": b"\\", b"r": b"\r"}.get(escaped) or bytes.fromhex(escaped[1:].decode())

    return ESCAPE.sub(one, line)


def output_of(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Of the lines that Ray has of a job, those of the launcher, decoded; all of them if it has not started."""
    before: list[bytes] | None = []
    for line in lines:
        if before is None:
            yield decoded(line)
        elif line == BEGIN.encode():
            before = None
        else:
            before.append(line)
    yield from before or ()


def main(words: Sequence[str]) -> int:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print(BEGIN, flush=True)
    argv = [*own_program(sys.executable, "dmltrain_launch.cli"), *words]
    popen = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, preexec_fn=_heed_signals)
    assert popen.stdout
    for line in popen.stdout:
        sys.stdout.buffer.write(encoded(line.removesuffix(b"\n")).encode() + b"\n")
        sys.stdout.buffer.flush()
    code = popen.wait()
    return code if code >= 0 else 128 - code


def _heed_signals() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
