"""Containers of a service of Hadoop's YARN (3.3 or later). Experimental: it was not run against a real cluster.

The launcher runs in a container, too. The service has containers for the job's hosts, which become bridges and call the
launcher. All of them, and the command that submits the job, see its folder of logs: the launcher's output and the
bridges' settings are there.
    service    what YARN is asked for, as values   api     requests to its ResourceManager
    container  what runs in the containers         hosts   in the launcher: the containers' bridges
    queue      to submit a job, follow it and find it again
"""

from __future__ import annotations

from dmltrain_launch.clusters.launcher import IN_CLUSTER, Launcher, own_options
from dmltrain_launch.job.options import Options
from dmltrain_launch.job.options.option import number, option, url


@own_options
class YarnOptions(Options):
    """The options of --launcher yarn."""

    yarn_url: str = option(
        "URL", "web address of YARN's ResourceManager, such as http://rm:8088", url, after="--slurm-job", here=True
    )
    yarn_hosts: int = option(
        "N", "containers of YARN that the processes are spread over (default: one per worker)", number(int, 1), 0
    )


LAUNCHER = Launcher(
    "containers of Hadoop's YARN; experimental, not run against a real cluster",
    YarnOptions,
    IN_CLUSTER,
    cluster="hosts",
    queue="queue",
    undetached="its launcher runs in a container; use --submit, which returns at once, and leave --detach out",
    inside=True,
)
