"""A kvstore in one process for one worker of several that have the same model."""

import numpy as np

from dmltrain.kvstore import Handle, KVStore


class Agreeing(KVStore):
    """The other workers say of themselves what this one does: in their rows of a table, or in numbers that are added
    up."""

    def all_reduce(self, name, array):
        return np.tile(array[self.rank], (self.num_workers, 1)) if array.ndim == 2 else array * self.num_workers


class Together(Handle):
    """Several keys of one call."""

    def __init__(self, handles: list[Handle]) -> None:
        super().__init__(1, "keys", 0.0)
        self._handles = handles

    @property
    def done(self) -> bool:
        return all(handle.done for handle in self._handles)

    def wait(self) -> None:
        for handle in self._handles:
            handle.wait()
        self.values = [array for handle in self._handles for array in handle.values]
