"""A process of a job that runs some of PyTorch's tests, one after another: program.py WAY FOLDER TEST ...

WAY is gloo, dmltrain, whose sums of floats are made in shared memory, or servers: dmltrain, with these sums over the
servers, however small they are. It says how each test has ended, and ends after one that has failed.
"""

import json
import multiprocessing
import os
import sys
from pathlib import Path

import torch.distributed as dist
from torch.testing._internal.common_distributed import TEST_SKIPS

from dmltrain.backends.torch.process_group import sums
from dmltrain.base import env
from tests.backends.peers.suite import Suite, distributed_test, skipped

SKIPS = {skip.exit_code: skip.message for skip in TEST_SKIPS.values()}


class Dmltrain(str):
    """Equals the name of gloo in comparisons that PyTorch's tests make while they run."""

    def __eq__(self, other: object) -> bool:
        return other in ("gloo", "dmltrain")

    __hash__ = str.__hash__


def run(test: str, folder: Path, rank: int) -> str:
    """ "passed", "skipped: REASON" or "failed"."""
    for place in ("barrier", "test_dir"):
        (folder / place).mkdir(parents=True, exist_ok=True)
    os.environ["TEMP_DIR"] = str(folder)
    distributed_test.INIT_METHOD = f"file://{folder}/second"
    distributed_test.Barrier.barrier_id = 0
    if reason := skipped(test):
        return f"skipped: {reason}"
    _torch_waits, pipe = multiprocessing.Pipe()
    try:
        Suite._run(rank, test, f"{folder}/first", pipe)
    except SystemExit as end:
        if dist.is_initialized():  # not after a test that has passed
            dist.destroy_process_group()
        return "passed" if not end.code else f"skipped: {SKIPS[end.code]}" if end.code in SKIPS else "failed"


if __name__ == "__main__":
    way, folder, *tests = sys.argv[1:]
    environment = env.read()
    if way == "servers":
        os.environ["DMLTRAIN_TRANSPORT"] = "tcp"
    if way != "gloo":
        import dmltrain.torch  # noqa: F401 (a server's process ends here)
    elif environment.role != "worker":
        sys.exit()
    if way == "servers":
        sums.SMALLEST = sums.LEAST_WITHIN = sums.LEAST_BETWEEN = 8  # bytes: one float64
    distributed_test.BACKEND = "gloo" if way == "gloo" else Dmltrain("dmltrain")
    os.environ.update(BACKEND=distributed_test.BACKEND, WORLD_SIZE=str(environment.num_workers))
    for test in tests:
        end = run(test, Path(folder) / test, environment.index)
        print(json.dumps({test: end}), flush=True)
        if end == "failed":
            sys.exit(1)
