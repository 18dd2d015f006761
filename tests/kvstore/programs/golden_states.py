"""Loads server states that 0.4 saved after three steps, makes two more, and saves the weights.

    golden_states.py STATES NAME RESULT.npz

STATES/NAME.server-K and NAME-after.npz were made by the same steps with dmltrain 0.4, 1 worker and 2 servers.
"""

import sys

import numpy as np

from dmltrain import kvstore

SPECS = {"sgd": {"name": "sgd", "lr": 0.1, "momentum": 0.9}, "adam": {"name": "adam", "lr": 0.01}}
states, name, result = sys.argv[1:]
store = kvstore.create("dist_sync")
weights = {"w": np.zeros((8, 12), np.float32), "b": np.zeros(7, np.float64)}
store.init(list(weights), list(weights.values()))
store.set_optimizer(SPECS[name])
store.load_optimizer_states(f"{states}/{name}")
for number in (3, 4):
    for key, value in weights.items():
        gradient = np.random.default_rng([number, value.size]).standard_normal(value.shape).astype(value.dtype)
        store.pushpull(key, gradient, value)
np.savez(result, **weights)
store.close()
