"""The processes of the job on this host: what they get at their start, and what they use."""

from __future__ import annotations

import selectors
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from dmltrain_launch.agent import commands
from dmltrain_launch.agent.channel import Channel
from dmltrain_launch.agent.children import Children
from dmltrain_launch.agent.host import cores
from dmltrain_launch.agent.ports import HeldPorts
from dmltrain_launch.agent.process import Process, members
from dmltrain_launch.agent.run_folder import RunFolder
from dmltrain_launch.agent.spawn import environment_here, spawn

if TYPE_CHECKING:
    from dmltrain_launch.agent.host.usage import Usage  # not every job samples

# An engine (Slurm, Ray) has given these GPUs to the job on this host. Only here can one see which they are: the bridge,
# or the program that starts it, names them in this variable.
GPUS = "DMLTRAIN_STEP_GPUS"
VISIBLE = "CUDA_VISIBLE_DEVICES"
OF_AMD = "HIP_VISIBLE_DEVICES"  # AMD's runtime reads it before VISIBLE, where it is set


class HostJob:
    """Starts `children` with the job's private folder and one of the held `ports`. `mark`: of the job, or "" before it.

    Call `sample` at `due`.
    """

    def __init__(self, selector: selectors.BaseSelector, channel: Channel, children: Children, ports: HeldPorts):
        self._selector, self._channel, self._children, self._ports = selector, channel, children, ports
        self.mark = ""
        self._folder: RunFolder | None = None
        self._usage: Usage | None = None
        self._usage_interval = 0.0  # s; 0: none
        self._ending = False

    def begin(self, job: commands.JobCommand) -> None:
        """Make the job's private folder."""
        self.mark, self._usage_interval = job.mark, job.usage
        self._folder = RunFolder(job.mark)
        if job.key:
            self._folder.create(job.key, job.certificate)

    def start(self, command: commands.Start) -> None:
        """Start the tasks, in order; answers one Started each."""
        base = environment_here(command.unset)
        given = base.pop(GPUS, "")
        base.pop(cores.VARIABLE, None)
        base.update(self._folder.variables(command.follows) if self._folder else {"DMLTRAIN_KEY_FILE": ""})
        for task in () if self._ending else command.tasks:
            listener = self._ports.take("scheduler") if task.listens else None
            own = with_share(base, given, task.environment)
            self._children.add(spawn(task, own, self._channel.host, listener))
        if self._usage_interval and not self._usage and not self._ending:
            from dmltrain_launch.agent.host.usage import Usage

            self._usage = Usage(self._selector, self._channel, self._usage_interval, time.monotonic())

    def follow(self, command: commands.Scheduler) -> None:
        """Tell the processes where the job's scheduler is now."""
        if self._folder and self._folder.scheduler_file and not self._ending:
            self._folder.follow(command.incarnation, command.address, command.port)

    @property
    def due(self) -> float:
        """When to sample what the processes use, by time.monotonic()."""
        return self._usage.due if self._usage and not self._ending else float("inf")

    def sample(self, now: float) -> None:
        if self._usage and now >= self.due:
            self._usage.sample(now)

    def end(self, now: float) -> None:
        """The job ends: nothing is started any more."""
        self._ending = True
        if self._usage:
            self._usage.close(now)

    def members(self, mark: str, root: int) -> dict[int, Process]:
        """The processes of the job, without nvidia-smi: it is killed, but may hang in its driver, which nobody
        awaits."""
        return {
            pid: process
            for pid, process in members(mark, root).items()
            if not (self._usage and self._usage.gpus.is_mine(process))
        }

    def remove(self, keep: str) -> None:
        """All has ended: remove the job's folders, but not `keep`."""
        if self._folder:
            self._folder.remove(keep)


def with_share(base: Mapping[str, str], given: str, task: Mapping[str, str]) -> dict[str, str]:
    """`base`, with the task's share of the devices `given` (see share_of_gpus) for AMD's runtime, too."""
    share = share_of_gpus(given, task)
    visible = share.get(VISIBLE) or task.get(VISIBLE)
    if visible and OF_AMD in base:
        share[OF_AMD] = visible
    return {**base, **share}


def share_of_gpus(given: str, task: Mapping[str, str]) -> dict[str, str]:
    """The variables that limit a task with this environment to its share of the devices `given`, such as 0,1.

    Workers of the host share as with gpus= in a hosts file (`dmltrain_launch.job.placement.gpus_of`). A worker keeps
    the devices that the user has chosen for it; servers and the scheduler see all."""
    devices = given.split(",") if given else []
    local, workers = task.get("LOCAL_RANK", ""), task.get("LOCAL_WORLD_SIZE", "")
    if not devices or not (local and workers) or VISIBLE in task:
        return {}
    number, count = int(local), int(workers)
    if count > len(devices):
        return {VISIBLE: devices[number % len(devices)]}
    return {VISIBLE: ",".join(devices[number * len(devices) // count : (number + 1) * len(devices) // count])}
