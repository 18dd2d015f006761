"""`--plan`: which process runs on which host, as JSON, for other programs. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence

from dmltrain_launch.job.host import Host
from dmltrain_launch.job.job import Job, Ports, tasks


def text(job: Job, hosts: Sequence[Host]) -> str:
    """A list with an object for each process, in the order of their start.

    role, rank; host: its name in the hosts file; hostname, user ("": the SSH configuration's) and port (0: the same):
    how SSH reaches it.
    """
    every = tasks(job, hosts, Ports(scheduler=job.port))
    rows = [
        {
            "role": task.role,
            "rank": task.rank,
            "host": task.host.name,
            "hostname": task.host.target,
            "user": task.host.user,
            "port": task.host.port,
        }
        for task in every
    ]
    return "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]"
