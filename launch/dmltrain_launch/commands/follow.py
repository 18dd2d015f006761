"""Follow a job whose launcher runs inside of a cluster: its output is shown here, and becomes the logs of the job.

That launcher prints the lines of its processes with tags, and at its end each of FILES as one line of base64. The
record comes from the cluster, so this machine keeps only fields that cannot make it reach other hosts: see `_own`.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from dmltrain.base import json_text, schema, whole_file
from dmltrain_launch import LaunchError
from dmltrain_launch.agent.text import safe_output
from dmltrain_launch.clusters.queue import Followed, Inside
from dmltrain_launch.commands.log_choice import Source, chosen
from dmltrain_launch.commands.submit import held, known_by, mark_ended, put
from dmltrain_launch.ending import FILE
from dmltrain_launch.job.options import Options
from dmltrain_launch.job.role import SCHEDULER, SERVER, WORKER
from dmltrain_launch.run.session import catching
from dmltrain_launch.terminal.log_folder import QUEUED, RECORD, LogFolder, unwritable
from dmltrain_launch.terminal.output import write_all
from dmltrain_launch.terminal.record import MODE, MOST_BYTES, read_own_record

FILES = (RECORD, "usage.csv")
FILE_LINE = re.compile(rb"%s ([a-z.]+) ([A-Za-z0-9+/=]*)" % FILE.encode())
TAGGED = re.compile(rb"\[(%s|%s|%s)-(\d+)\] " % (SCHEDULER.encode(), SERVER.encode(), WORKER.encode()))
Write = Callable[[bytes], None]
Say = Callable[[str], None]


class Interrupted(BaseException):
    """A signal has come."""


class Signals:
    """Raises Interrupted for the first signal after `arm`. `arrived`: the first signal of all, 0 before."""

    def __init__(self) -> None:
        self.arrived, self._armed = 0, False

    def arm(self) -> None:
        self._armed = True

    def disarm(self) -> None:
        self._armed = False

    def take(self, number: int) -> None:
        self.arrived = self.arrived or number
        if self._armed:
            self._armed = False
            raise Interrupted


def run(job: Inside[Options], say: Say) -> int:
    """Submit a job, and follow it to its end. Returns its exit code. A signal ends it."""
    signals = Signals()
    with catching(signals.take):
        submitted, folder = put(job)
        say(f"job {job.name} is {submitted.where}")
        say(f"dmltrain job ps {known_by(job)}, and the same with logs and kill, find it from elsewhere")
        followed = held(job.path)
        assert isinstance(followed, Followed)
        with Copy(folder, lambda source: not (source and job.options.quiet)) as copy:
            try:
                code = _follow(followed, copy, say, job.options.queue_wait, signals)
            except LaunchError as error:
                _cancel(followed, job, error.code, say)
                raise
        _cancel(followed, job, code, say)
        return code


def _follow(job: Followed, copy: Copy, say: Say, limit: float | None, signals: Signals) -> int:
    """Follow the job to its end, or end it after a signal. Returns the exit code."""
    try:
        signals.arm()
        if signals.arrived:
            raise Interrupted
        copy.take(job.lines(True, say, limit))
        code = job.exit_code()
        signals.disarm()
        return code
    except Interrupted:
        signals.disarm()
        say("ending the job")
    try:
        signals.arm()  # a second signal ends the wait for the launcher's last output
        if job.stop():
            copy.take(job.lines(True, say))
        signals.disarm()
    except Interrupted:
        pass
    except LaunchError as error:
        signals.disarm()
        say(f"warning: {error}")
    return 128 + signals.arrived


def _cancel(followed: Followed, job: Inside[Options], code: int, say: Say) -> None:
    """Remove the job from the engine, and note in the log folder that it has ended."""
    try:
        followed.cancel()
        mark_ended(job.path, code)
    except LaunchError as error:
        say(f"warning: {error}")


def logs(options: Options, folder: Path, say: Say) -> bool:
    """For `dmltrain job logs`: fetch the logs of the job in `folder`, if another command has submitted it.

    Returns whether the logs were also shown, which is so with --follow.
    """
    followed = held(folder)
    if not isinstance(followed, Followed):
        return False
    try:
        locked = LogFolder(folder, again=True)
    except LaunchError:  # another command copies it
        return False
    wanted = chosen(options.show)
    with Copy(locked, lambda source: options.follow and source is not None and wanted(source), safe=True) as copy:
        copy.take(followed.lines(options.follow, say))
    return options.follow


class Copy:
    """Writes the output of the job's processes to its logs.

    `shown`: whether to print the lines of a source, or of the launcher (None). `safe`: escape control characters in the
    output of processes, too; in the launcher's own lines they are always escaped.
    """

    def __init__(self, folder: LogFolder, shown: Callable[[Source | None], bool], safe: bool = False):
        self._folder, self._shown, self._safe, self._taken = folder, shown, safe, 0
        self._logs: dict[Source, Write] = {}
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Copy:
        return self

    def __exit__(self, *raised: object) -> None:
        self._open.close()

    def take(self, lines: Iterable[bytes]) -> None:
        """The lines of `Followed.lines`, from the start; those that an earlier call has taken are left out."""
        for number, line in enumerate(lines):
            if number >= self._taken:
                self._taken += 1
                self._take(line)

    def _take(self, line: bytes) -> None:
        if match := FILE_LINE.fullmatch(line):
            return _keep(self._folder, match[1].decode(), match[2])
        tag = TAGGED.match(line)
        source = Source(tag[1].decode(), int(tag[2])) if tag else None
        if tag and source:
            if source not in self._logs:
                self._logs[source] = self._open.enter_context(_log(self._folder, str(source)))
            self._logs[source](line[tag.end() :] + b"\n")
        if self._shown(source):
            line = line if tag and not self._safe else safe_output(line)
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
            content = base64.b64decode(text, validate=True)
            if name == RECORD:
                content = _own(folder.path, content)
            whole_file.write(folder.path / name, content, MODE)
        except (OSError, binascii.Error) as error:
            raise LaunchError(f"cannot write {folder.path / name}: {error}") from None


def _own(folder: Path, content: bytes) -> bytes:
    """The record that has come with the job's output. It is that of the engine that has got the job from here, and how
    hosts are reached is for this machine's user to say: `dmltrain job` runs what a record names. LaunchError."""
    record: dict[str, Any] = {}
    queued: dict[str, Any] = {}
    with contextlib.suppress(FileNotFoundError, schema.Invalid):
        queued = read_own_record(folder / QUEUED)
        record = json_text.parse_object(content, MOST_BYTES)
    if not record or record.get("launcher") != queued.get("launcher"):
        engine = queued.get("launcher", "any engine")
        raise LaunchError(
            f"the job's output has a {RECORD} that is not the record of a job of {engine}: something in it passes for "
            "its launcher, so do not trust what the job has printed"
        )
    kept = schema.salvaged(_Kept, record)
    hosts = [{name: value for name, value in vars(host).items() if value} for host in kept.hosts]
    launched_from = {"host": kept.launched_from.host} if record.get("launched_from") else {}
    changed = {"hosts": hosts, "reached_by": {}, "control": "", "launched_from": launched_from}
    return (json.dumps({**record, **changed}, indent=2) + "\n").encode()


@dataclass(frozen=True)
class _Where:
    name: str = ""
    address: str = ""
    hostname: str = ""


@dataclass(frozen=True)
class _From:
    host: str = ""


@dataclass(frozen=True)
class _Kept:
    """The fields of a record that have a part which is kept."""

    hosts: tuple[_Where, ...] = ()
    launched_from: _From = _From()


def print_files(folder: Path) -> None:
    """At the end of a launcher that is followed."""
    for name in FILES:
        with contextlib.suppress(FileNotFoundError):
            text = base64.b64encode((folder / name).read_bytes()).decode()
            print(f"{FILE} {name} {text}", flush=True)
