"""On the user's machine: give a job to YARN, follow it, find it again, end it."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dmltrain_launch import LaunchError
from dmltrain_launch.clusters.queue import ENDED_CODE, FAULT_CODE, NAME, Inside, Submitted, Waiting, waited_too_long
from dmltrain_launch.clusters.yarn import YarnOptions
from dmltrain_launch.clusters.yarn.api import Absent, Api, me
from dmltrain_launch.clusters.yarn.container import END, OUTPUT, SETTINGS
from dmltrain_launch.clusters.yarn.service import (
    ENDED,
    Described,
    running,
    service,
    service_name,
    state,
    table,
    variables,
    wanted,
)

LOOK_SECONDS = 0.3  # between looks at the launcher's output
ASK_SECONDS = 2.0  # between questions to YARN, which start a client each
Say = Callable[[str], None]


def described(job: Inside[YarnOptions]) -> Described:
    """LaunchError for what YARN does not accept."""
    if not job.options.yarn_url:
        raise LaunchError("--yarn-url is missing: the ResourceManager's web address, such as --yarn-url http://rm:8088")
    return Described(
        service_name(job.name, exact=bool(job.options.job)),
        job.options,
        ("--job", job.name, *job.words),
        os.getcwd(),
        str(job.path.absolute()),
        sys.executable,
        variables(job.options, os.environ),
    )


class Queue:
    """See `dmltrain_launch.clusters.queue`."""

    def artefact(self, job: Inside[YarnOptions]) -> list[str]:
        described_job = described(job)
        text = json.dumps(service(described_job), indent=2)
        return [
            f"mkdir -p '{described_job.folder}' && cat > '{described_job.name}.json' << 'END'",
            *text.splitlines(),
            "END",
        ] + [f"yarn app -launch {described_job.name} '{described_job.name}.json'"]

    def submit(self, job: Inside[YarnOptions]) -> Submitted:
        described_job = described(job)
        for name in (OUTPUT, SETTINGS):  # of an earlier job
            job.path.joinpath(name).unlink(missing_ok=True)
        api = Api(job.options.yarn_url.rstrip("/"), me())
        api.create(service(described_job))
        record = {"yarn_service": described_job.name, "yarn_url": api.url, "yarn_user": api.user}
        return Submitted(record, f"the service {described_job.name} of YARN at {api.url}")

    def held(self, record: Mapping[str, Any], where: Path) -> Held:
        name, url, user = (record.get(key) for key in ("yarn_service", "yarn_url", "yarn_user"))
        if not (isinstance(name, str) and NAME.fullmatch(name)):
            raise LaunchError(f"{where}: yarn_service is {ascii(name)}: expected the name of a service of YARN")
        if not (isinstance(url, str) and url.startswith(("http://", "https://")) and isinstance(user, str)):
            raise LaunchError(f"{where}: yarn_url is {ascii(url)}: expected a URL, and a name as yarn_user")
        return Held(name, Api(url, user), where.parent / OUTPUT)


READ_BYTES = 1 << 20  # of the output at once
TAIL_BYTES = 1 << 12  # which have the launcher's last line


@dataclass(frozen=True)
class Held:
    """The service of this name, whose launcher writes to `output`. See `dmltrain_launch.clusters.queue`."""

    name: str
    api: Api
    output: Path

    @property
    def lives(self) -> bool:
        service_status = self.api.get(self.name)
        return service_status is not None and service_status.get("state") not in ENDED

    def state(self) -> list[str]:
        found = self.api.get(self.name)
        if found is None:
            return [f"YARN's service {self.name} has ended, and is removed"]
        return [f"YARN's service {self.name} {state(found)}", *table(found.get("components"))]

    def cancel(self) -> None:
        self.api.destroy(self.name)

    def lines(self, wait: bool, say: Say, limit: float | None = None) -> Iterator[bytes]:
        rest, position, over = b"", 0, not wait
        asked, waiting, began = 0.0, Waiting(say), time.monotonic()
        while True:
            data = self._read(position)
            position += len(data)
            *whole, rest = (rest + data).split(b"\n")
            for line in whole:
                if line.startswith(END.encode() + b" "):
                    return
                yield line
            if over and not data:
                return
            if not data and time.monotonic() - asked >= ASK_SECONDS:
                over, text = self._asked()
                if not position:
                    waiting.tell(text)
                    waited_too_long(text, began, limit)
                asked = time.monotonic()
            if not data:
                time.sleep(LOOK_SECONDS)

    def _read(self, position: int) -> bytes:
        try:
            with self.output.open("rb") as file:
                file.seek(position)
                return file.read(READ_BYTES)
        except FileNotFoundError:
            return b""

    def _asked(self) -> tuple[bool, str]:
        """Whether the service has ended, and what YARN says about it."""
        try:
            found = self.api.get(self.name)
        except Absent as error:
            return False, f"{error}; trying again"
        if found is None:
            return True, ""
        waits = running(found) < wanted(found)
        return found.get("state") in ENDED, f"waiting: YARN's service {self.name} {state(found)}" if waits else ""

    def stop(self) -> bool:
        return False

    def exit_code(self) -> int:
        """LaunchError if the launcher has not said it."""
        size = self.output.stat().st_size if self.output.exists() else 0
        *_, last = self._read(max(0, size - TAIL_BYTES)).split(b"\n")[:-1] or [b""]
        word, _, code = last.decode(errors="replace").partition(" ")
        if word == END and code.isdecimal():
            return int(code)
        found = self.api.get(self.name)
        if found is None:
            raise LaunchError(f"YARN's service {self.name} was removed while it ran", ENDED_CODE)
        raise LaunchError(
            f"YARN's service {self.name} {state(found)}, and its launcher has not said how it ended: `yarn logs "
            f"-applicationId {found.get('id', 'ID')}` prints its containers' output. Do all nodes see {sys.executable} "
            f"and {self.output.parent}, and may your containers write there?",
            FAULT_CODE,
        )
