"""Requests that are well-formed and impossible: numbers that the optimizer does not take, a learning rate of worker 1
that is not a number, an empty state file."""

import sys
from pathlib import Path

import numpy as np

from dmltrain import errors, kvstore

errors.end_scripts_without_traceback()
kv = kvstore.create("dist_async")
kv.init("w", np.zeros(10, np.float32))
if sys.argv[1] == "betas":
    kv.set_optimizer({"name": "adam", "betas": 0.9})
kv.set_optimizer({"name": "sgd", "lr": 0.1})
if sys.argv[1] == "rate":
    kv.pushpull("w", np.ones(10, np.float32), np.zeros(10, np.float32), rate=float("nan") if kv.rank == 1 else 0.1)
    kv.barrier()
Path(sys.argv[2] + ".server-0").write_bytes(b"")
kv.load_optimizer_states(sys.argv[2])
