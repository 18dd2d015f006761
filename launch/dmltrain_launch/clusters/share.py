"""What an engine is asked for, for each host of a job: as much as its workers and servers need together. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from dmltrain_launch.job.options import Options
from dmltrain_launch.job.role import SERVER, WORKER


@dataclass(frozen=True)
class Share:
    """`memory` in MiB. 0: nothing is asked for."""

    cpus: int
    memory: int
    gpus: int


def share(options: Options, hosts: int, cores_of_worker: int) -> Share:
    """The share of one of so many hosts. `cores_of_worker`: without --worker-cores."""
    workers, servers = ceil((options.num_workers or 1) / hosts), ceil(options.servers / hosts)
    cores = {
        setting.role: int(setting.value)
        for setting in options.settings
        if setting.name == "OMP_NUM_THREADS" and setting.role
    }
    return Share(
        workers * cores.get(WORKER, cores_of_worker) + servers * cores.get(SERVER, 0),
        workers * options.worker_memory + servers * options.server_memory,
        workers * options.worker_gpus,
    )
