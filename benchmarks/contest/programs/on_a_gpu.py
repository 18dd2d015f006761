"""One process of a job whose workers share a GPU (gpu/shared.py).

on_a_gpu.py NETWORK DEPTH BATCH DTYPE SECONDS OPTION ...
"""

from __future__ import annotations

import json
import os
import sys
import time

import dmltrain.kvstore

NETWORK, DEPTH, BATCH, DTYPE, SECONDS = sys.argv[1:6]
KIND = sys.argv[sys.argv.index("--kv-store") + 1]
CIFAR = (3, 32, 32)
WARM_UP = 3  # steps

if os.environ.get("DMLC_ROLE", "worker") != "worker":
    dmltrain.kvstore.create(KIND)  # serves the job and ends; torch is not imported

import numpy as np  # noqa: E402
from gpu.training import GPU, RATE, Case  # noqa: E402

from dmltrain.backends.torch import devices  # noqa: E402


def main() -> None:
    store = dmltrain.kvstore.create(KIND)
    case = Case(NETWORK, int(BATCH), DTYPE, int(DEPTH), CIFAR if int(DEPTH) < 18 else None)
    trainer = case.trainer(" ".join(["--gpus 0", *sys.argv[6:]]), store)
    images, labels = case.samples(store.rank)

    def step_seconds(steps: int) -> float:
        since = time.perf_counter()
        for _ in range(steps):
            trainer.train_step(images, labels, case.batch * store.num_workers, RATE)
        trainer.settle()
        devices.wait(GPU)
        return (time.perf_counter() - since) / steps

    step_seconds(WARM_UP)
    own = np.array([step_seconds(WARM_UP)])
    mean = float(store.all_reduce("seconds of a step", own)[0]) / store.num_workers
    taken = step_seconds(max(WARM_UP, int(float(SECONDS) / mean)))  # equally many on all workers
    speed = {"images_per_second": case.batch / taken, "step_ms": taken * 1e3, "MiB": trainer.device_memory()}
    print(json.dumps(speed), flush=True)
    store.close()


if __name__ == "__main__":
    main()
