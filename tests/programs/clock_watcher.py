"""A worker that makes rounds for a time, and prints how far apart the wall clock's readings were. Argument: seconds."""

import sys
import time

import numpy as np

from dmltrain import kvstore
from dmltrain.base import errors

errors.end_scripts_without_traceback()
kv = kvstore.create("dist_sync")
gradient, out = np.ones(1000, np.float32), np.zeros(1000, np.float32)
kv.init("w", gradient)
readings, end = [], time.monotonic() + float(sys.argv[1])
while kv.all_reduce("workers that go on", np.array([time.monotonic() < end])) > 0:
    readings.append(time.time())
    kv.pushpull("w", gradient, out)
    kv.barrier()
    time.sleep(0.01)
print(f"{len(readings)} rounds, wall clock {max(readings) - min(readings):.0f} s", flush=True)
kv.close()
