"""Two workers that declare different sizes for one key."""

import numpy as np

import dmltrain
from dmltrain import kvstore

rank = dmltrain.rank()
kv = kvstore.create("dist_sync")
kv.init("w", np.zeros(10 + rank, np.float32))
