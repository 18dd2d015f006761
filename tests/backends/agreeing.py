"""A kvstore in one process for one worker of several that have the same model."""

import numpy as np

from dmltrain.kvstore import KVStore


class Agreeing(KVStore):
    """The other workers say of themselves what this one does: in their rows of a table, or in numbers that are added
    up."""

    def all_reduce(self, name, array):
        return np.tile(array[self.rank], (self.num_workers, 1)) if array.ndim == 2 else array * self.num_workers
