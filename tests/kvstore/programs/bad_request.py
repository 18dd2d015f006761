"""Requests that are well-formed and impossible: numbers that the optimizer does not take ("betas"), a learning rate of
worker 1 that is not a number ("rate")."""

import sys

import numpy as np

from dmltrain import errors, kvstore

errors.end_scripts_without_traceback()
kv = kvstore.create("dist_async")
kv.init("w", np.zeros(10, np.float32))
kv.set_optimizer({"name": "adam", "betas": 0.9} if sys.argv[1] == "betas" else {"name": "sgd", "lr": 0.1})
kv.pushpull("w", np.ones(10, np.float32), np.zeros(10, np.float32), rate=float("nan") if kv.rank == 1 else 0.1)
kv.barrier()
