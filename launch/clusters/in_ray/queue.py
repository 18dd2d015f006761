"""Jobs of Ray whose program is a launcher: submitted, followed, found again and ended.

Ray copies the folder in which the command is given to its head, and starts the launcher in that copy.
"""

from __future__ import annotations

import json
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

from launch import LaunchError
from launch.clusters.in_ray.environment import AUTO, runtime_env
from launch.clusters.in_ray.jobs import DASHBOARD, Absent, Client, Found
from launch.clusters.queue import FOLLOWED, SUBMITTED, Inside, Submitted, passed_on, waited_too_long
from launch.terminal.log_folder import LOGS

NAME = re.compile(r"[A-Za-z0-9_.-]+")
LOOK_SECONDS = 0.3  # between looks at a job that has not started, or is about to end
AWAY_SECONDS = 1.0  # between tries while the dashboard does not answer
MONITOR_SECONDS = 1.5  # Ray looks at a job once a second, and would call one that it has just deleted a failed one
STOP_SECONDS = 30.0  # for the end of a job; Ray kills it after 3 s
FAULT_CODE, STOPPED_CODE = 125, 143
Say = Callable[[str], None]


def dashboard(given: str) -> str:
    """The URL of --address; "" for the cluster that this machine belongs to. LaunchError if it is none."""
    if given in ("", AUTO):
        return ""
    if not given.startswith(("http://", "https://")):
        raise LaunchError(f"--address {given}: to submit a job, expected auto or {DASHBOARD}")
    return given.rstrip("/")


def entrypoint(job: Inside) -> str:
    """The shell command that Ray runs on its head. LaunchError for secrets."""
    own = passed_on(job.options, os.environ, "Ray shows the command of a job in its dashboard")
    own |= {SUBMITTED: FOLLOWED, "PYTHONUNBUFFERED": "1"}
    settings = [f"{name}={value}" for name, value in own.items()]
    command = ["exec", "env", *settings, "python", "-m", "launch.cli", "--launcher-inside", "yes"]
    return shlex.join([*command, "--job", job.name, *job.words])


def environment(job: Inside) -> dict[str, Any]:
    """The runtime environment of the job in Ray: the user's, with this folder if that names none."""
    return {"working_dir": ".", "excludes": [f"/{LOGS}"], **runtime_env(job.options.ray_runtime_env)}


class Queue:
    """See `launch.clusters.queue`."""

    def artefact(self, job: Inside) -> list[str]:
        url = dashboard(job.options.address)
        words = ["ray", "job", "submit", *([f"--address={url}"] if url else []), "--no-wait", "--runtime-env-json"]
        return [f"{shlex.join([*words, json.dumps(environment(job))])} -- {entrypoint(job)}"]

    def submit(self, job: Inside) -> Submitted:
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
    """Ray's job of this name. See `launch.clusters.queue`."""

    name: str
    url: str

    @cached_property
    def _client(self) -> Client:
        return Client(self.url)

    def _found(self) -> Found | None:
        return self._client.found(self.name)

    @property
    def lives(self) -> bool:
        found = self._found()
        return found is not None and found.lives

    def state(self) -> list[str]:
        found = self._found()
        if found is None:
            return [f"Ray's job {self.name} has ended, and is deleted"]
        return [f"Ray's job {self.name} is {found.status}{f': {found.message}' if found.message else ''}"]

    def cancel(self) -> None:
        """Stop it if it runs, and delete it."""
        end = time.monotonic() + STOP_SECONDS
        if self.lives:
            self._client.stop(self.name)
        while self.lives:
            if time.monotonic() > end:
                raise LaunchError(
                    f"Ray's job {self.name} still runs, {STOP_SECONDS:g} s after it was stopped", FAULT_CODE
                )
            time.sleep(LOOK_SECONDS)
        while self._found():
            self._client.delete(self.name)
            time.sleep(MONITOR_SECONDS)

    def lines(self, wait: bool, say: Say, limit: float | None = None) -> Iterator[bytes]:
        if not wait:
            yield from self._client.printed(self.name).encode().splitlines()
            return
        self._wait_started(say, limit)
        given, said = 0, ""
        while True:
            try:
                for number, line in enumerate(_whole(self._client.follow(self.name))):
                    if number >= given:
                        given += 1
                        yield line
                return
            except Absent as error:
                if (text := f"{error}; trying again") != said:
                    say(text)
                    said = text
                time.sleep(AWAY_SECONDS)

    def _wait_started(self, say: Say, limit: float | None) -> None:
        began, said = time.monotonic(), ""
        while (found := self._found()) and found.status == "PENDING":
            text = f"waiting: Ray's job {self.name} is PENDING{f': {found.message}' if found.message else ''}"
            if text != said:
                say(text)
                said = text
            waited_too_long(text, began, limit)
            time.sleep(LOOK_SECONDS)

    def exit_code(self) -> int:
        found = self._found()
        if found is None or found.status == "STOPPED":
            how = "deleted" if found is None else "stopped"
            raise LaunchError(f"Ray's job {self.name} was {how} while it ran", STOPPED_CODE)
        if found.code is None:
            raise LaunchError(f"Ray's job {self.name} is {found.status}: {found.message}", FAULT_CODE)
        return found.code if found.code >= 0 else 128 - found.code


def _whole(pieces: Iterator[str]) -> Iterator[bytes]:
    """Their lines, without the ends."""
    rest = b""
    for piece in pieces:
        *lines, rest = (rest + piece.encode()).split(b"\n")
        yield from lines
    if rest:
        yield rest
