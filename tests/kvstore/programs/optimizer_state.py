"""Optimizer state on the servers: saved, changed, loaded again. Argument: a path."""

import sys

import numpy as np

from dmltrain import kvstore

kv = kvstore.create("dist_async")
size = 2_500_000  # three slices on two servers
kv.init("w", np.zeros(size, np.float32))
kv.set_optimizer({"name": "sgd", "lr": 0.5, "momentum": 0.9})
out = np.empty(size, np.float32)
kv.pushpull("w", np.ones(size, np.float32), out)
assert (out == -0.5).all()
kv.save_optimizer_states(sys.argv[1])
kv.pushpull("w", np.ones(size, np.float32), out)
second = out.copy()
kv.load_optimizer_states(sys.argv[1])
kv.pull("w", out)
assert (out == -0.5).all(), out
kv.pushpull("w", np.ones(size, np.float32), out)
assert out.tobytes() == second.tobytes()
kv.pushpull("w", np.ones(size, np.float32), out, rate=0.0)  # a learning rate reaches the servers with its push
assert (out == second).all()
print("all as expected")
