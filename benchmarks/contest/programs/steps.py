"""Steps of synchronous training without a framework, and their times: prints {"began": when the first step began, in
seconds since the epoch, "seconds": of each step} as JSON. Argument: the number of steps."""

import json
import sys
import time

import numpy as np

from dmltrain import kvstore

KEYS, SIZE = 100, 10_000  # float32: 4 MB
COMPUTE_SECONDS = 0.01  # of a step


def main() -> None:
    store = kvstore.create("dist_sync")
    keys = [f"w{number}" for number in range(KEYS)]
    store.init(keys, [np.zeros(SIZE, np.float32) for _ in keys])
    gradients = [np.ones(SIZE, np.float32) for _ in keys]
    outs = [np.zeros(SIZE, np.float32) for _ in keys]
    store.barrier()
    began, seconds = time.time(), []
    for _ in range(int(sys.argv[1])):
        since = time.perf_counter()
        while time.perf_counter() - since < COMPUTE_SECONDS:
            sum(range(1000))
        store.pushpull(keys, gradients, out=outs)
        seconds.append(time.perf_counter() - since)
    store.barrier()
    print(json.dumps({"began": began, "seconds": seconds}), flush=True)
    store.close()


main()
