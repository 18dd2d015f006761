"""A job that trains until the test lets it end. Arguments: phase the test wants (start, middle, exit), a folder.

start: nobody comes far before the test acts. middle: rounds without end. exit: workers print `closing` and wait for the
file `go` before they close.
"""

import sys
import time
from pathlib import Path

import numpy as np

from dmltrain import kvstore
from dmltrain.base import errors

errors.end_scripts_without_traceback()
phase, folder = sys.argv[1], Path(sys.argv[2])
kv = kvstore.create("dist_sync")
gradient, out = np.ones(1000, np.float32), np.zeros(1000, np.float32)
kv.init("w", gradient)
deadline = time.monotonic() + 60
kv.pushpull("w", gradient, out)
print("ready", flush=True)
while phase != "exit" and time.monotonic() < deadline:
    kv.pushpull("w", gradient, out)
print("closing", flush=True)
while not (folder / "go").exists() and time.monotonic() < deadline:
    time.sleep(0.01)
kv.close()
