"""Each worker's share of the GPUs that an engine (Slurm, Ray) has given to the job on this host. Pure.

Only on the host can one see which GPUs these are: the bridge, or the program that starts it, names them in VARIABLE.
"""

from __future__ import annotations

from collections.abc import Mapping

VARIABLE = "DMLTRAIN_STEP_GPUS"
VISIBLE = "CUDA_VISIBLE_DEVICES"


def share(given: str, task: Mapping[str, str]) -> dict[str, str]:
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
