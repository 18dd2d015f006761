"""Follow a job whose launcher runs inside of a cluster: its output is shown here, and becomes the logs of the job.

That launcher prints the lines of its processes with tags, and at its end each of FILES as one line of base64.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

from launch import LaunchError, whole_file
from launch.clusters.queue import Followed, Inside
from launch.commands.log_choice import Source, chosen
from launch.commands.submit import held, known_by, put
from launch.job.options import Options
from launch.job.role import SCHEDULER, SERVER, WORKER
from launch.run.session import catching
from launch.terminal.log_folder import RECORD, LogFolder, unwritable
from launch.terminal.output import write_all
from launch.terminal.record import MODE

FILES = (RECORD, "usage.csv")
FILE_LINE = re.compile(rb"dmltrain-file ([a-z.]+) ([A-Za-z0-9+/=]*)")
TAGGED = re.compile(rb"\[(%s|%s|%s)-(\d+)\] " % (SCHEDULER.encode(), SERVER.encode(), WORKER.encode()))
Write = Callable[[bytes], None]


class Interrupted(BaseException):
    """A signal has come."""


def run(job: Inside, say: Callable[[str], None]) -> int:
    """Submit a job, and follow it to its end. Returns its exit code. A signal ends it."""
    submitted, folder = put(job)
    say(f"job {job.name} is {submitted.where}")
    say(f"dmltrain job ps {known_by(job)}, and the same with logs and kill, find it from elsewhere")
    found = held(job.path)
    assert isinstance(found, Followed)
    arrived = 0

    def interrupted(number: int) -> None:
        nonlocal arrived
        if not arrived:
            arrived = number
            raise Interrupted

    with catching(interrupted):
        try:
            copy(found, folder, True, say, lambda source: not (source and job.options.quiet), job.options.queue_wait)
            code = found.exit_code()
        except Interrupted:
            say("ending the job")
            code = 128 + arrived
        except LaunchError:
            found.cancel()
            raise
        try:
            found.cancel()
        except LaunchError as error:
            say(f"warning: {error}")
        return code


def logs(options: Options, folder: Path, say: Callable[[str], None]) -> bool:
    """For `dmltrain job logs`: fetch the logs of a job that another command has submitted, if the folder has one. True
    if that has also shown them, which it does with --follow."""
    found = held(folder)
    if not isinstance(found, Followed):
        return False
    try:
        locked = LogFolder(folder, again=True)
    except LaunchError:  # another command copies it
        return False
    wanted = chosen(options.show)
    copy(found, locked, options.follow, say, lambda source: options.follow and source is not None and wanted(source))
    return options.follow


def copy(
    job: Followed,
    folder: LogFolder,
    wait: bool,
    say: Callable[[str], None],
    shown: Callable[[Source | None], bool],
    limit: float | None = None,
) -> None:
    """Write the output of the job's processes to its logs. `shown`: whether to print lines of this source, or of the
    launcher (None). With `wait` until the job's end; LaunchError if it has not started after `limit` seconds."""
    with contextlib.ExitStack() as open_files:
        logs: dict[Source, Write] = {}
        for line in job.lines(wait, say, limit):
            if found := FILE_LINE.fullmatch(line):
                _keep(folder, found[1].decode(), found[2])
                continue
            tag = TAGGED.match(line)
            source = Source(tag[1].decode(), int(tag[2])) if tag else None
            if tag and source:
                if source not in logs:
                    logs[source] = open_files.enter_context(_log(folder, str(source)))
                logs[source](line[tag.end() :] + b"\n")
            if shown(source):
                _print(sys.stdout if tag else sys.stderr, line + b"\n")


def _print(stream: TextIO, line: bytes) -> None:
    """A closed terminal or pipe does not end the copy."""
    with contextlib.suppress(OSError):
        write_all(stream.fileno(), line)


@contextlib.contextmanager
def _log(folder: LogFolder, name: str) -> Iterator[Write]:
    """Writes to the log `name`, which is empty at first."""
    descriptor = folder.open_log(name)
    try:
        os.ftruncate(descriptor, 0)
        yield lambda data: write_all(descriptor, data)
    except OSError as error:
        raise unwritable(folder.path / f"{name}.log", error) from None
    finally:
        os.close(descriptor)


def _keep(folder: LogFolder, name: str, text: bytes) -> None:
    if name in FILES:
        try:
            whole_file.write(folder.path / name, base64.b64decode(text, validate=True), MODE)
        except (OSError, binascii.Error) as error:
            raise LaunchError(f"cannot write {folder.path / name}: {error}") from None


def print_files(folder: Path) -> None:
    """At the end of a launcher that is followed."""
    for name in FILES:
        with contextlib.suppress(FileNotFoundError):
            text = base64.b64encode((folder / name).read_bytes()).decode()
            print(f"dmltrain-file {name} {text}", flush=True)
