"""In the launcher, which runs in a container of its own: the containers that are the job's hosts, and their bridges."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from dmltrain.base import whole_file
from dmltrain_launch import LaunchError
from dmltrain_launch.channels.bridges.reception import Caller
from dmltrain_launch.clusters.called import CalledCluster
from dmltrain_launch.clusters.launcher import Released
from dmltrain_launch.clusters.queue import Waiting, waited_too_long
from dmltrain_launch.clusters.yarn.container import INSIDE, SETTINGS
from dmltrain_launch.job.host import Host
from dmltrain_launch.job.options import Options

LOOK_SECONDS = 0.3  # between looks at how many hosts have called
PRIVATE = 0o600
TWICE = (
    "the cluster has to obey placement constraints, by yarn.resourcemanager.placement-constraints.handler=scheduler in "
    "its yarn-site.xml"
)


class Cluster(CalledCluster):
    """See `dmltrain_launch.clusters`. In the launcher's container: it waits until all hosts have called."""

    def __init__(self, options: Options, hosts: Sequence[Host] | None = None):
        if hosts is not None:
            raise Released("the containers of a job go with its launcher")
        if not os.environ.get(INSIDE):
            raise LaunchError("--launcher yarn runs its launcher in YARN only: leave --launcher-inside no out")
        settings = json.loads(os.environ[INSIDE])
        self._count = int(settings["hosts"])
        super().__init__(options, "container")  # callers are known by the number of their container
        path = Path(settings["folder"], SETTINGS)
        try:
            whole_file.write(path, self._settings().encode(), PRIVATE)
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
        waiting, began = Waiting(lambda line: print(line, file=sys.stderr)), time.monotonic()
        with self._changed:
            while len(self._callers) < self._count:
                why = f"waiting: {len(self._callers)} of {self._count} hosts have called"
                waiting.tell(why)
                waited_too_long(why, began, self._queue_wait)
                self._changed.wait(LOOK_SECONDS)

    def _admit(self, caller: Caller) -> bool:
        wanted = caller.index in range(self._count)
        if wanted:
            self._callers[str(caller.index)] = caller
        return wanted

    def _caller_for(self, host: Host) -> Caller | None:
        return self._callers.pop(self._numbers.get(host.name, ""), None)

    def _why_silent(self, host: Host) -> str:
        known = host.name in self._numbers
        return "its container has ended, or its node is lost" if known else "the job has no such host"
