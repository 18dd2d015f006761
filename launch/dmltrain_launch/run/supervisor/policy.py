"""What a supervisor does when its job loses a process: a value that it is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dmltrain_launch.job.host import Host
from dmltrain_launch.job.job import Job


@dataclass(frozen=True)
class Policy:
    """The first loss ends the job; or the job `goes_on`, and replaces at most so many lost processes of each role.

    Only a job that goes on can get other workers while it runs. `listed`: hosts that the user has described, also those
    without a process. `watched`: whether the job follows changes of the file that lists them.
    """

    goes_on: bool = False
    workers: int = 0
    servers: int = 0
    schedulers: int = 0
    listed: tuple[Host, ...] = ()
    watched: bool = False


END = Policy()


def policy_of(job: Job, listed: Sequence[Host] = (), watched: bool = False) -> Policy:
    """What the user has asked for with --elastic and --restart-ROLE."""
    if not job.elastic:
        return END
    return Policy(True, job.restart_workers, job.restart_servers, job.restart_scheduler, tuple(listed), watched)
