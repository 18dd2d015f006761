"""Rounds of pushes and pulls over TCP; prints a digest of all results and the sent bytes as JSON."""

import hashlib
import json

import numpy as np

from dmltrain import kvstore

SIZES = {"big": 300_000, "one": 1, "odd": 70_001, "none": 0}  # elements; the first is several slices

store = kvstore.create("dist_sync", transport="tcp")
keys, outs = list(SIZES), [np.zeros(size, np.float32) for size in SIZES.values()]
store.init(keys, outs)
digest, before = hashlib.sha256(), store.bytes_sent
for clock in range(4):
    draw = np.random.default_rng([store.rank, clock])
    store.pushpull(keys, [draw.standard_normal(size).astype(np.float32) for size in SIZES.values()], out=outs)
    digest.update(b"".join(out.tobytes() for out in outs))
print(json.dumps({"digest": digest.hexdigest(), "sent": store.bytes_sent - before}))
store.close()
