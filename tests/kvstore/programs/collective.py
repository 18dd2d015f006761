"""What MXNet's own distributed kvstore tests check: init, push, pull, pushpull, several devices, small and large
keys.
"""

import sys

import numpy as np

from dmltrain import kvstore

kv = kvstore.create("dist_sync")
n = kv.num_workers
shape, big = (2, 3), (1200, 1200)  # the big one is cut into slices
kv.init(["3", "5", 99], [np.ones(shape, np.float32), np.ones(shape, np.float32), np.ones(big, np.float32)])
first = np.zeros(shape, np.float32)
kv.pull("3", first)
assert (first == 1).all(), first

for step in range(1, 6):
    kv.push(["3", 99], [np.full(shape, step + kv.rank, np.float32), np.full(big, (kv.rank + 1) * step, np.float32)])
    small, large = np.zeros(shape, np.float32), np.zeros(big, np.float32)
    kv.pull(["3", 99], [small, large])
    assert (small == n * step + n * (n - 1) / 2).all(), small
    assert (large == step * n * (n + 1) / 2).all(), large

kv.push("5", [np.ones(shape, np.float32), np.full(shape, 2, np.float32)])  # two devices of this worker
outs = [np.zeros(shape, np.float32), np.zeros(shape, np.float32)]
kv.pull("5", outs)
assert all((out == 3 * n).all() for out in outs), outs

turned = np.zeros((3, 2), np.float32).T  # memory that values cannot land in directly
kv.pull("5", turned)
assert (turned == 3 * n).all()

value = np.full(shape, 2.0, np.float32)
kv.pushpull("3", value)
assert (value == 2 * n).all()
assert kv.all_reduce("ranks", np.array([kv.rank, 1.0])).tolist() == [n * (n - 1) / 2, n]
kv.barrier()
assert kv.bytes_sent > 6 * 4 * 1200 * 1200 / 2 and kv.bytes_received > 5 * 4 * 1200 * 1200
print("all as expected", file=sys.stderr)
kv.close()
