"""Jobs whose launcher runs inside of a cluster: what an engine offers to start them, and to find them again.

A launcher with --submit has a class `Queue` in its module beside its `Cluster`. The launcher inside has the same
command line, and SUBMITTED in its environment, which says that it is not to submit the job again. Where it does not see
the folder of logs of the command that submits the job, its output is copied there: its jobs are `Followed`, and
SUBMITTED is FOLLOWED.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from dmltrain_launch import LaunchError
from dmltrain_launch.clusters import LAUNCHERS, part_of
from dmltrain_launch.job.job import Setting
from dmltrain_launch.job.options import Options
from dmltrain_launch.secret import is_secret

SUBMITTED = "DMLTRAIN_SUBMITTED"
TIMEOUT, FAULT_CODE, ENDED_CODE = 124, 125, 143  # exit codes; the last one: somebody has ended the job
NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")  # of a job, for most engines
NOT_PASSED_ON = ("PYTHONPATH", "PYTHONUNBUFFERED")  # folders of this machine; set for the launcher inside
FOLLOWED = "followed"  # its value, else "1"
Of = TypeVar("Of", bound=Options)  # the options of the launcher


@dataclass(frozen=True)
class Inside(Generic[Of]):
    """A job for a launcher inside: its command line `argv`, and what that says. Its logs go to `path`. `words`: the
    command line for a launcher that sees no file of this machine."""

    options: Of
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
    def artefact(self, job: Inside[Any]) -> list[str]:
        """What the engine would get, for --dry-run: it also works by hand. Pure."""

    def submit(self, job: Inside[Any]) -> Submitted:
        """Give it to the engine. LaunchError, with a fix, if that refuses."""

    def held(self, record: Mapping[str, Any], where: Path) -> Held:
        """The job that was `found_by` this; LaunchError names the file `where` if that makes no sense."""


def queue_of(name: str, where: object = "--submit") -> Queue:
    """The queue of the launcher `name`; LaunchError if it has none."""
    if name not in LAUNCHERS or not LAUNCHERS[name].queue:
        some = [each for each, row in LAUNCHERS.items() if row.queue]
        raise LaunchError(f"{where}: launcher {name!r} has no queue: expected {' or '.join(some)}")
    queue: Queue = part_of(name, LAUNCHERS[name].queue, "Queue")()
    return queue


def waited_too_long(why: str, began: float, limit: float | None) -> None:
    """LaunchError if the wait that `began` then (time.monotonic) has passed --queue-wait."""
    if limit is not None and time.monotonic() - began >= limit:
        raise LaunchError(f"{why or 'the launcher has not started'}; gave up after {limit:g} s (--queue-wait)", TIMEOUT)


def engine_name(engine: str, name: str, exact: bool, most: int, cut: Callable[[str], str]) -> str:
    """A job's name, made one that the engine accepts, and shortened by `cut`. `exact`: the user has chosen it, so it is
    not changed, but refused by a LaunchError."""
    made = re.sub("[^a-z0-9]+", "-", name.lower()).strip("-")
    made = cut(made if made[:1].isalpha() else f"job-{made}")
    if exact and not (NAME.fullmatch(name) and len(name) <= most):
        raise LaunchError(
            f"--job {name}: {engine} accepts names of a-z, 0-9 and -, which begin with a letter and have at most "
            f"{most} characters: use --job {made.strip('-')}"
        )
    return name if exact else made


def secret_settings(options: Options) -> list[Setting]:
    """The variables for the job that may be secret."""
    named = {setting.name for setting in options.settings if setting.secret}
    return [setting for setting in options.settings if is_secret(setting.name, named)]


def here(options: Options, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables for the job that this machine has, too, and a launcher inside needs."""
    same = {setting.name: setting.value for setting in options.settings if environ.get(setting.name) == setting.value}
    return {name: value for name, value in same.items() if name not in NOT_PASSED_ON}


def passed_on(options: Options, environ: Mapping[str, str], shown: str) -> dict[str, str]:
    """`here`. LaunchError for secrets; `shown` says who would see them."""
    for setting in secret_settings(options):
        raise LaunchError(
            f"{setting.name} may be secret, and {shown}: let the program read it from a file that only you can read"
        )
    return here(options, environ)


class Waiting:
    """Says what a job waits for when that has changed, and has stayed so for `still` seconds."""

    def __init__(self, say: Callable[[str], None], still: float = 0.0):
        self._say, self._still = say, still
        self._text, self._since, self._said = "", 0.0, ""

    def tell(self, text: str, now: float = 0.0) -> None:
        if text != self._text:
            self._text, self._since = text, now
        if text and text != self._said and now - self._since >= self._still:
            self._said = text
            self._say(text)


def refusal(said: str, fixes: Mapping[str, str]) -> str:
    """The fixes for what an engine has said, as lines to add to it."""
    return "".join(f"\n{fix}" for sign, fix in fixes.items() if sign in said)
