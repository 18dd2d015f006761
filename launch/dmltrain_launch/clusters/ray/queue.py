"""Jobs of Ray whose program is a launcher: submitted, followed, found again and ended.

Ray copies the folder in which the command is given to its head, and starts the launcher in that copy.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from dmltrain_launch import LaunchError
from dmltrain_launch.clusters.queue import (
    ENDED_CODE,
    FAULT_CODE,
    FOLLOWED,
    SUBMITTED,
    Inside,
    Submitted,
    Waiting,
    passed_on,
    waited_too_long,
)
from dmltrain_launch.clusters.ray import RayOptions, inside
from dmltrain_launch.clusters.ray.environment import AUTO, runtime_env
from dmltrain_launch.clusters.ray.jobs import DASHBOARD, Absent, Client, Found
from dmltrain_launch.own_program import own_program
from dmltrain_launch.terminal.log_folder import LOGS

NAME = re.compile(r"[A-Za-z0-9_.-]+")
LOOK_SECONDS = 0.3  # between looks at a job that has not started, or is about to end
AWAY_SECONDS = 1.0  # between tries while the dashboard does not answer
# Ray looks at a job once a second. If the job is deleted before that look, Ray records it again, as a failed job. So it
# is deleted this many seconds after its end, and again, up to DELETIONS times, if Ray still has a record.
MONITOR_SECONDS = 2.5
DELETIONS = 3
STOP_SECONDS = 60.0  # for the end of a job that was stopped
LAUNCHER_SECONDS = 10.0  # for the launcher's end, beside --grace
PATIENCE_SECONDS = 30.0  # for a dashboard that does not answer for a moment
Say = Callable[[str], None]


def dashboard(given: str) -> str:
    """The URL of --address; "" for the cluster that this machine belongs to. LaunchError if it is none."""
    if given in ("", AUTO):
        return ""
    parts = urlsplit(given)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise LaunchError(f"--address {given}: to submit a job, expected auto or {DASHBOARD}")
    return given.rstrip("/")


def entrypoint(job: Inside[RayOptions]) -> str:
    """The shell command that Ray runs on its head. LaunchError for secrets."""
    own = passed_on(job.options, os.environ, "Ray shows the command of a job in its dashboard")
    own |= {SUBMITTED: FOLLOWED, "PYTHONUNBUFFERED": "1"}
    settings = [f"{name}={value}" for name, value in own.items()]
    command = ["exec", "env", *settings, *own_program("python", inside.__name__), "--launcher-inside", "yes"]
    return shlex.join([*command, "--job", job.name, *job.words])


def environment(job: Inside[RayOptions]) -> dict[str, Any]:
    """The runtime environment of the job in Ray: the user's, with this folder if that names none. Ray waits for the
    launcher's end as long as that waits for its processes."""
    runtime_environment = runtime_env(job.options.ray_runtime_env)
    variables = runtime_environment.get("env_vars")
    if variables is None or isinstance(variables, dict):
        stop = str(round(job.options.grace + LAUNCHER_SECONDS))
        runtime_environment = {
            **runtime_environment,
            "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": stop, **(variables or {})},
        }
    return {"working_dir": ".", "excludes": [f"/{LOGS}"], **runtime_environment}


class Queue:
    """See `dmltrain_launch.clusters.queue`."""

    def artefact(self, job: Inside[RayOptions]) -> list[str]:
        address = dashboard(job.options.address)
        return [
            "python - << 'END'",
            "from ray.job_submission import JobSubmissionClient",
            f"client = JobSubmissionClient({address!r})" if address else "client = JobSubmissionClient()",
            f"print(client.submit_job(entrypoint={entrypoint(job)!r},",
            f"    runtime_env={environment(job)!r}))",
            "END",
        ]

    def submit(self, job: Inside[RayOptions]) -> Submitted:
        command, client = entrypoint(job), Client(dashboard(job.options.address))
        name = f"{re.sub('[^A-Za-z0-9_.-]', '-', job.name)}-{secrets.token_hex(4)}"
        client.submit(name, command, environment(job))
        return Submitted({"ray_job": name, "ray_address": client.url}, f"Ray's job {name}, at {client.url}")

    def held(self, record: Mapping[str, Any], where: Path) -> Held:
        name, url = record.get("ray_job"), record.get("ray_address")
        if not (isinstance(name, str) and NAME.fullmatch(name)):
            raise LaunchError(f"{where}: ray_job is {ascii(name)}: expected the name of a job of Ray")
        if not (isinstance(url, str) and url.startswith(("http://", "https://"))):
            raise LaunchError(f"{where}: ray_address is {ascii(url)}: expected {DASHBOARD}")
        return Held(name, url)


@dataclass(frozen=True)
class Held:
    """Ray's job of this name. See `dmltrain_launch.clusters.queue`."""

    name: str
    url: str

    @cached_property
    def _client(self) -> Client:
        return Client(self.url)

    def _found(self, patience: float = 0.0) -> Found | None:
        """What Ray says of it. If the dashboard does not answer, it is asked again for `patience` seconds."""
        until = time.monotonic() + patience
        while True:
            try:
                return self._client.found(self.name)
            except Absent:
                if time.monotonic() >= until:
                    raise
                time.sleep(AWAY_SECONDS)

    @property
    def lives(self) -> bool:
        return _lives(self._found())

    def state(self) -> list[str]:
        found = self._found()
        if found is None:
            return [f"Ray's job {self.name} has ended, and is deleted"]
        return [f"Ray's job {self.name} is {_said(found)}"]

    def stop(self) -> bool:
        self._client.stop(self.name)
        return True

    def cancel(self) -> None:
        """Stop it if it runs, and delete it."""
        end = time.monotonic() + STOP_SECONDS
        if _lives(self._found(PATIENCE_SECONDS)):
            self._client.stop(self.name)
        while self.lives:
            if time.monotonic() > end:
                how = f"{STOP_SECONDS:g} s after it was stopped; `ray job status {self.name}` shows it"
                raise LaunchError(f"Ray's job {self.name} still runs, {how}", FAULT_CODE)
            time.sleep(LOOK_SECONDS)
        for _ in range(DELETIONS):
            if not self._found():
                return
            time.sleep(MONITOR_SECONDS)
            self._client.delete(self.name)
            time.sleep(AWAY_SECONDS)

    def lines(self, wait: bool, say: Say, limit: float | None = None) -> Iterator[bytes]:
        return inside.output_of(self._lines(wait, say, limit))

    def _lines(self, wait: bool, say: Say, limit: float | None) -> Iterator[bytes]:
        """All lines that Ray has of the job's output.

        A connection may be lost or end early. So Ray is asked whether the job has ended; only then the rest is fetched.
        """
        given, waiting = 0, Waiting(say)
        if wait:
            self._wait_started(say, limit)
        while wait and _lives(self._found(PATIENCE_SECONDS)):
            try:
                for number, line in enumerate(_whole(self._living_pieces())):
                    if number >= given:
                        given += 1
                        yield line
            except Absent as error:
                waiting.tell(f"{error}; trying again")
            time.sleep(LOOK_SECONDS)
        text = self._client.printed(self.name).removesuffix("\n")
        yield from text.encode(errors="replace").split(b"\n")[given:] if text else ()

    def _living_pieces(self) -> Iterator[str]:
        """Of its output, until it ends, or the connection does."""
        for piece in self._client.follow(self.name):
            if not piece and not _lives(self._found(PATIENCE_SECONDS)):
                return
            yield piece

    def _wait_started(self, say: Say, limit: float | None) -> None:
        waiting, began = Waiting(say), time.monotonic()
        while (found := self._found(PATIENCE_SECONDS)) and found.status == "PENDING":
            text = f"waiting: Ray's job {self.name} is {_said(found)}"
            waiting.tell(text)
            waited_too_long(text, began, limit)
            time.sleep(LOOK_SECONDS)

    def exit_code(self) -> int:
        found = self._found(PATIENCE_SECONDS)
        if found is None or found.status == "STOPPED":
            how = "deleted" if found is None else "stopped"
            raise LaunchError(f"Ray's job {self.name} was {how} while it ran", ENDED_CODE)
        if found.code is None:
            raise LaunchError(f"Ray's job {self.name} is {_said(found)}", FAULT_CODE)
        return found.code if found.code >= 0 else 128 - found.code


def _lives(job: Found | None) -> bool:
    return job is not None and job.lives


def _said(job: Found) -> str:
    """Its state, and the first line of what Ray says about that: others are of the program's output."""
    first, *_ = [*job.message.splitlines(), ""]
    return job.status + (f": {''.join(filter(str.isprintable, first))}" if first else "")


def _whole(pieces: Iterator[str]) -> Iterator[bytes]:
    """Their whole lines, without the ends."""
    rest = b""
    for piece in pieces:
        *lines, rest = (rest + piece.encode(errors="replace")).split(b"\n")
        yield from lines
