"""Worker 1 reads round 1 where the server wrote it, while worker 0 is a round ahead; then both go on."""

import time

import numpy as np

from dmltrain import kvstore

store = kvstore.create("dist_sync", transport="shm")
store.init("a", np.zeros(300_000, np.float32))
buffer = store.buffers(["a"])[0]
for clock in range(1, 8):
    buffer[:] = clock
    (result,) = store.pushpull("a", buffer, out=kvstore.READ).values
    if store.rank == 1:
        time.sleep(0.1)  # worker 0 has pushed the next round meanwhile
    assert (result == 2 * clock).all(), result
for clock in (8, 9, 10):  # no worker pulls 8 and 9
    store.push("a", np.full(300_000, clock, np.float32))
out = np.zeros(300_000, np.float32)
store.pull("a", out)
assert (out == 20).all(), out
store.close()
print("all as expected", flush=True)
