"""Jobs whose launcher runs inside of a cluster: what an engine offers to start them, and to find them again.

A launcher with --submit has a class `Queue` in its module beside its `Cluster`. The launcher inside has the same
command line, and SUBMITTED in its environment, which says that it is not to submit the job again. Where it does not see
the folder of logs of the command that submits the job, its output is copied there: its jobs are `Followed`, and
SUBMITTED is FOLLOWED.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from dmltrain_launch import LaunchError
from dmltrain_launch.clusters import LAUNCHERS
from dmltrain_launch.job.options import Options
from dmltrain_launch.secret import is_secret

SUBMITTED = "DMLTRAIN_SUBMITTED"
TIMEOUT = 124  # exit code
NOT_PASSED_ON = ("PYTHONPATH", "PYTHONUNBUFFERED")  # folders of this machine; set for the launcher inside
FOLLOWED = "followed"  # its value, else "1"


@dataclass(frozen=True)
class Inside:
    """A job for a launcher inside: its command line `argv`, and what that says. Its logs go to `path`. `words`: the
    command line for a launcher that sees no file of this machine."""

    options: Options
    argv: tuple[str, ...]
    name: str
    path: Path
    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class Submitted:
    """The engine has the job. `found_by`: what finds it again, as JSON. `where` completes "job NAME is ..."."""

    found_by: Mapping[str, object]
    where: str


class Held(Protocol):
    """A job that the engine has, or had. Each method may raise LaunchError."""

    @property
    def lives(self) -> bool:
        """Whether it waits or runs."""

    def state(self) -> list[str]:
        """What the engine says about it, and why it waits, as lines."""

    def cancel(self) -> None:
        """Take it out of the queue, or end it, and remove what the engine keeps of it."""


@runtime_checkable
class Followed(Held, Protocol):
    """A job whose launcher does not write to this machine's folder of logs."""

    def lines(self, wait: bool, say: Callable[[str], None], limit: float | None = None) -> Iterator[bytes]:
        """What its launcher has printed, from the start, as lines without their ends. With `wait` until its end: then
        `say` is told what the job waits for, while it does. LaunchError if the launcher has not started after `limit`
        seconds."""

    def stop(self) -> bool:
        """Ask its launcher to end the job, so that its output ends. False if the engine offers only `cancel`."""

    def exit_code(self) -> int:
        """That of its launcher, which has ended."""


class Queue(Protocol):
    def artefact(self, job: Inside) -> list[str]:
        """What the engine would get, for --dry-run: it also works by hand. Pure."""

    def submit(self, job: Inside) -> Submitted:
        """Give it to the engine. LaunchError, with a fix, if that refuses."""

    def held(self, record: Mapping[str, Any], where: Path) -> Held:
        """The job that was `found_by` this; LaunchError names the file `where` if that makes no sense."""


def queue_of(name: str, where: object = "--submit") -> Queue:
    """The queue of the launcher `name`; LaunchError if it has none."""
    if name not in LAUNCHERS or "--submit" not in LAUNCHERS[name].options:
        some = [each for each, row in LAUNCHERS.items() if "--submit" in row.options]
        raise LaunchError(f"{where}: launcher {name!r} has no queue: expected {' or '.join(some)}")
    queue: Queue = importlib.import_module(f"dmltrain_launch.clusters.{name}").Queue()
    return queue


def waited_too_long(why: str, began: float, limit: float | None) -> None:
    """LaunchError if the wait that `began` then (time.monotonic) has passed --queue-wait."""
    if limit is not None and time.monotonic() - began >= limit:
        raise LaunchError(f"{why or 'the launcher has not started'}; gave up after {limit:g} s (--queue-wait)", TIMEOUT)


def passed_on(options: Options, environ: Mapping[str, str], shown: str) -> dict[str, str]:
    """The variables of this machine that a launcher inside needs: those that --env passes on. LaunchError for secrets;
    `shown` says who would see them."""
    named = {setting.name for setting in options.settings if setting.secret}
    for setting in options.settings:
        if is_secret(setting.name, named):
            raise LaunchError(
                f"{setting.name} may be secret, and {shown}: let the program read it from a file that only you can read"
            )
    same = {setting.name: setting.value for setting in options.settings if environ.get(setting.name) == setting.value}
    return {name: value for name, value in same.items() if name not in NOT_PASSED_ON}


def refusal(said: str, fixes: Mapping[str, str]) -> str:
    """The fixes for what an engine has said, as lines to add to it."""
    return "".join(f"\n{fix}" for sign, fix in fixes.items() if sign in said)
