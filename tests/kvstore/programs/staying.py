"""Worker 0 leaves after a round, and its relay stays for the other worker of its host. The others wait."""

import time

import numpy as np

from dmltrain import kvstore
from dmltrain.base import errors

errors.end_scripts_without_traceback()
store = kvstore.create("dist_sync")
store.init("w", np.zeros(100_000, np.float32))
store.pushpull("w", np.ones(100_000, np.float32))
if store.rank:
    time.sleep(120.0)
store.close()
