"""Worker 1 makes two steps, worker 0 wants more."""

import numpy as np

from dmltrain import errors, kvstore

errors.end_scripts_without_traceback()
kv = kvstore.create("dist_sync")
kv.init("w", np.zeros(10, np.float32))
for _ in range(2 if kv.rank else 10):
    kv.pushpull("w", np.ones(10, np.float32))
kv.close()
