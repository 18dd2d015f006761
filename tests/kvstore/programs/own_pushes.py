"""dist_async or dist_ssp: each worker's elements are changed by its own pushes alone, which every pull must show.

Arguments: kvstore, transport. The memory of a push is written again as soon as its pull has returned.
"""

import sys

import numpy as np

from dmltrain import kvstore

STEPS = 40
store = kvstore.create(sys.argv[1], transport=sys.argv[2])
store.init("w", np.zeros(1 << 19, np.float32))
store.set_optimizer({"name": "sgd", "lr": 1.0})
(gradient,), weights = store.buffers(["w"]), np.zeros(1 << 19, np.float32)
own = slice(store.rank, None, store.num_workers)
for step in range(1, STEPS + 1):
    gradient[:] = 0
    gradient[own] = -1.0
    store.pushpull("w", gradient, weights, rate=1.0)
    assert (weights[own] == step).all(), (step, np.unique(weights[own])[:5])
    gradient[:] = 777.0
store.barrier()
store.pull("w", weights)
assert (weights == STEPS).all(), np.unique(weights)[:5]
store.close()
print("all as expected", flush=True)
