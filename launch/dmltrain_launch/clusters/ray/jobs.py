"""Jobs of Ray, by Ray's own client for its dashboard: what `ray job submit|status|logs|stop|delete` do.

What fails is a LaunchError, with a fix if one is known.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from dmltrain_launch import LaunchError
from dmltrain_launch.clusters.ray.environment import need_ray

DASHBOARD = "a URL such as http://head.example.com:8265, the address of Ray's dashboard"
NOT_FOUND = "status code 404"
OVERRIDING = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")  # Ray's client would take these instead of the address given
QUIET_SECONDS = 20.0
SAID_CHARACTERS = 1000
ENDED = ("STOPPED", "SUCCEEDED", "FAILED")


class Absent(LaunchError):
    """The dashboard does not answer."""


@dataclass(frozen=True)
class Found:
    """What Ray says of a job. `code`: the exit code of its command; None while that runs, or if Ray has ended it."""

    status: str
    message: str
    code: int | None

    @property
    def lives(self) -> bool:
        return self.status not in ENDED


class Client:
    """`url`: of the dashboard; "" for the cluster that this machine belongs to, or that RAY_ADDRESS names."""

    def __init__(self, url: str):
        need_ray()
        self.url = url or "the address of the cluster of this machine"
        self._client = self._ask(_connected, url)
        self.url = str(self._client.get_address())

    def submit(self, name: str, command: str, environment: Mapping[str, Any]) -> None:
        submit = partial(self._client.submit_job, entrypoint=command, submission_id=name)
        accepted = self._ask(submit, runtime_env=dict(environment))
        if not accepted:
            raise LaunchError(f"Ray at {self.url} does not take jobs: it answered with 404; --address is {DASHBOARD}")

    def found(self, name: str) -> Found | None:
        """None if Ray knows it no more."""
        info = self._ask(self._client.get_job_info, name)
        return Found(str(info.status.value), info.message or "", info.driver_exit_code) if info else None

    def stop(self, name: str) -> None:
        """Ask for its end; nothing if it has ended."""
        self._ask(self._client.stop_job, name)

    def delete(self, name: str) -> None:
        """Let Ray forget a job that has ended."""
        self._ask(self._client.delete_job, name)

    def printed(self, name: str) -> str:
        """All that it has printed so far."""
        return str(self._ask(self._client.get_job_logs, name) or "")

    def follow(self, name: str) -> Iterator[str]:
        """What it prints, from the start, in pieces; "" when it has printed nothing for QUIET_SECONDS. The end may also
        be that of the connection. Absent if that was lost."""
        pieces: queue.SimpleQueue[str | Exception | None] = queue.SimpleQueue()

        async def fetch() -> None:
            async for piece in self._client.tail_job_logs(name):
                pieces.put(piece)

        def run() -> None:
            try:
                asyncio.run(fetch())
                pieces.put(None)
            except Exception as error:  # of many types
                pieces.put(error)

        # in a thread, so that a signal, which ends this iterator, does not come within the event loop
        threading.Thread(target=run, daemon=True).start()
        while True:
            try:
                piece = pieces.get(timeout=QUIET_SECONDS)
            except queue.Empty:
                piece = ""
            if piece is None:
                return
            if isinstance(piece, Exception):
                raise self._lost(piece)
            yield piece

    def _ask(self, call: Callable[..., Any], *arguments: object, **named: object) -> Any:
        """What the client answers; None for a job that Ray does not know."""
        try:
            return call(*arguments, **named)
        except OSError as error:  # those of the client's own HTTP library are
            raise self._lost(error) from None
        except Exception as error:  # the client checks neither what users give nor what servers answer
            said = one_line(error)
            if NOT_FOUND in said:
                return None
            if isinstance(error, RuntimeError | ValueError):
                raise LaunchError(f"Ray at {self.url}: {said}") from None
            if named:
                raise LaunchError(f"--ray-runtime-env: Ray does not take it: {said}") from None
            what = f"{self.url} gives no answer of Ray ({type(error).__name__}: {said})"
            raise LaunchError(f"{what}; --address is {DASHBOARD}") from None

    def _lost(self, error: Exception) -> Absent:
        what = f"Ray's dashboard does not answer at {self.url}: {one_line(error)}"
        return Absent(f"{what}; --address is {DASHBOARD}", 125)


def one_line(error: Exception) -> str:
    """What an error says; of a server's traceback the last line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    if any(line.startswith("Traceback") for line in lines):
        lines = [lines[0], lines[-1]]
    return "".join(filter(str.isprintable, " ".join(lines)))[:SAID_CHARACTERS]


def _connected(url: str) -> Any:
    from ray.job_submission import JobSubmissionClient

    for name in ("dashboard_sdk", "job.sdk"):
        logging.getLogger(f"ray.dashboard.modules.{name}").setLevel(logging.WARNING)
    hidden = {name: os.environ.pop(name) for name in OVERRIDING if url and name in os.environ}
    try:
        return JobSubmissionClient(url or None)
    finally:
        os.environ.update(hidden)
