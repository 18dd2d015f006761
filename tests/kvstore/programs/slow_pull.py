"""Worker 1 pulls the weights long after worker 0 has begun to load the servers' state. Argument: a path."""

import sys
import time

import numpy as np

from dmltrain import kvstore

kv = kvstore.create("dist_sync")
kv.init("w", np.zeros(8, np.float32))
kv.set_optimizer({"name": "sgd", "lr": 0.5})
out = np.empty(8, np.float32)
kv.pushpull("w", np.ones(8, np.float32), out)
saved = out.copy()
if kv.rank == 0:
    kv.save_optimizer_states(sys.argv[1])
kv.barrier()
kv.pushpull("w", np.ones(8, np.float32), out)
before = out.copy()
if kv.rank == 1:
    time.sleep(1.0)
kv.pull("w", out)
assert (out == before).all() and (out != saved).all(), "pulled what worker 0 loads"
kv.load_optimizer_states(sys.argv[1])
kv.pull("w", out)
assert (out == saved).all(), "pulled what was there before the load"
kv.close()
