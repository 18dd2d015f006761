"""A worker that trains until something happens. Argument: kvstore. Prints `ready` when the first round is over."""

import sys
import time

import numpy as np

from dmltrain import kvstore
from dmltrain.base.errors import JobLost

try:
    kv = kvstore.create(sys.argv[1])
    kv.init("w", np.zeros(100_000, np.float32))
    if sys.argv[1] != "dist_sync":
        kv.set_optimizer({"name": "sgd", "lr": 0.1})
    gradient, out = np.ones(100_000, np.float32), np.zeros(100_000, np.float32)
    deadline = time.monotonic() + 120
    kv.pushpull("w", gradient, out)
    print("ready", flush=True)
    while time.monotonic() < deadline:
        kv.pushpull("w", gradient, out)
        time.sleep(0.01)  # as computing gradients takes
except JobLost as error:
    print(f"lost: {error}", flush=True)
    sys.exit(error.exit_code)
sys.exit(9)  # nothing happened
