"""Containers of a service of Hadoop's YARN (3.3 or later). Experimental: it was not run against a real cluster.

The launcher runs in a container, too. The service has containers for the job's hosts, which become bridges and call the
launcher. All of them, and the command that submits the job, see its folder of logs: the launcher's output and the
bridges' settings are there.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dmltrain.base import whole_file
from dmltrain_launch import LaunchError, channels
from dmltrain_launch.channels.bridges.channel import BridgeChannel
from dmltrain_launch.channels.bridges.reception import Caller, Reception
from dmltrain_launch.channels.bridges.runs import addresses
from dmltrain_launch.clusters import Released
from dmltrain_launch.clusters.in_yarn.api import Absent, Api, me
from dmltrain_launch.clusters.in_yarn.container import END, INSIDE, OUTPUT, SETTINGS
from dmltrain_launch.clusters.in_yarn.service import (
    ENDED,
    NAME,
    Described,
    running,
    service,
    service_name,
    state,
    table,
    variables,
    wanted,
)
from dmltrain_launch.clusters.queue import Inside, Submitted, waited_too_long
from dmltrain_launch.job.host import Host
from dmltrain_launch.job.options import Options

LOOK_SECONDS = 0.3  # between looks at the launcher's output
ASK_SECONDS = 2.0  # between questions to YARN, which start a client each
PRIVATE = 0o600
DELETED_CODE, FAULT_CODE = 143, 125
TWICE = (
    "the cluster has to obey placement constraints, by yarn.resourcemanager.placement-constraints.handler=scheduler in "
    "its yarn-site.xml"
)
Say = Callable[[str], None]


def described(job: Inside) -> Described:
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

    def artefact(self, job: Inside) -> list[str]:
        described_job = described(job)
        text = json.dumps(service(described_job), indent=2)
        return [
            f"mkdir -p '{described_job.folder}' && cat > '{described_job.name}.json' << 'END'",
            *text.splitlines(),
            "END",
        ] + [f"yarn app -launch {described_job.name} '{described_job.name}.json'"]

    def submit(self, job: Inside) -> Submitted:
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
        asked, last_text, began = 0.0, "", time.monotonic()
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
                if text and text != last_text and not position:
                    say(text)
                if not position:
                    waited_too_long(text, began, limit)
                asked, last_text = time.monotonic(), text
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
            raise LaunchError(f"YARN's service {self.name} was removed while it ran", DELETED_CODE)
        raise LaunchError(
            f"YARN's service {self.name} {state(found)}, and its launcher has not said how it ended: `yarn logs "
            f"-applicationId {found.get('id', 'ID')}` prints its containers' output. Do all nodes see {sys.executable} "
            f"and {self.output.parent}, and may your containers write there?",
            FAULT_CODE,
        )


class Cluster:
    """See `dmltrain_launch.clusters`. In the launcher's container: it waits until all hosts have called."""

    def __init__(self, options: Options, hosts: Sequence[Host] | None = None):
        if hosts is not None:
            raise Released("the containers of a job go with its launcher")
        if not os.environ.get(INSIDE):
            raise LaunchError("--launcher yarn runs its launcher in YARN only: leave --launcher-inside no out")
        settings = json.loads(os.environ[INSIDE])
        self._seconds, self._count = options.connect_timeout, int(settings["hosts"])
        self._queue_wait = options.queue_wait
        self._reception = Reception(options.host_ip)
        self._changed = threading.Condition()
        self._callers: dict[int, Caller] = {}  # by the number of the container
        self._token = self._reception.expect(self._take)
        path = Path(settings["folder"], SETTINGS)
        try:
            reached = addresses([Host("a container")], options.host_ip)
            bridge_settings = self._reception.settings_for(self._token, reached, self._seconds, stays=True)
            whole_file.write(path, bridge_settings.encode(), PRIVATE)
            self._wait()
        except LaunchError:
            self.close()
            raise
        except OSError as error:
            raise LaunchError(f"{path}: {error.strerror}: all containers must be able to use this folder") from None
        finally:
            with contextlib.suppress(OSError):
                path.unlink()
        self._numbers = {caller.host: number for number, caller in self._callers.items()}
        if len(self._numbers) < self._count:
            self.close()
            raise LaunchError(f"two containers of the job are on one node: {TWICE}")
        gpus = tuple(map(str, range(settings["gpus"])))
        self.hosts = [Host(name, gpus=gpus) for name in sorted(self._numbers)]

    def _wait(self) -> None:
        began, last_text = time.monotonic(), ""
        with self._changed:
            while len(self._callers) < self._count:
                why = f"waiting: {len(self._callers)} of {self._count} hosts have called"
                if why != last_text:
                    print(why, file=sys.stderr)
                    last_text = why
                waited_too_long(why, began, self._queue_wait)
                self._changed.wait(LOOK_SECONDS)

    def _take(self, caller: Caller) -> bool:
        with self._changed:
            if caller.index not in range(self._count):
                return False
            self._callers[caller.index] = caller
            self._changed.notify_all()
            return True

    def connect(self, host: Host, mark: str, timeout: float | None = None) -> BridgeChannel:
        """A channel to a new agent; LaunchError if that takes more than `timeout` seconds (None: --connect-timeout)."""
        seconds = self._seconds if timeout is None else timeout
        number = self._numbers.get(host.name, -1)
        with self._changed:
            self._changed.wait_for(lambda: number in self._callers, seconds)
            caller = self._callers.pop(number, None)
        if caller is None:
            what = f"{host.name} was not reached within {seconds:g} s (--connect-timeout)"
            why = "its container has ended, or its node is lost" if number >= 0 else "the job has no such host"
            raise LaunchError(f"{what}: {why}", FAULT_CODE)
        command, text = channels.remote_command(host, mark)
        return BridgeChannel(caller.stream, str(caller), command, text, lambda limit: "")

    def close(self) -> None:
        """End the bridges. Agents that still run then end their processes and themselves."""
        self._reception.close()
        for caller in self._callers.values():
            caller.stream.abort()
