"""Steps of made-up compute: worker K sleeps the K-th of the given seconds, then all exchange BYTES in 4 keys. Prints
what the epoch went for, as JSON. Usage: waits.py BYTES STEPS SECONDS..."""

import json
import sys
import time

import numpy as np

from dmltrain import kvstore
from dmltrain.train import epoch_cost

size, steps, *seconds = map(float, sys.argv[1:])
store = kvstore.create("dist_sync")
keys = list(range(4))
gradients = [np.ones(int(size) // 16, np.float32) for _ in keys]
store.init(keys, gradients)
store.pushpull(keys, gradients)
store.barrier()
limits = store.measure_limits()
store.barrier()
start = epoch_cost.mark(store)
for _ in range(int(steps)):
    time.sleep(seconds[store.rank % len(seconds)])
    store.pushpull(keys, gradients)
end = epoch_cost.mark(store)
store.barrier()
found = epoch_cost.spent_between(store, start, end)
print(json.dumps({"epoch": end.seconds - start.seconds, "limits": limits, **found}), flush=True)
store.close()
