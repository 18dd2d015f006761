"""Training as with own_folder.py, where the memory of worker 1 changes: in the first epoch the last bits of a weight,
in the second a whole one. Arguments: FOLDER, the backend, then the options."""

import runpy
import sys
from pathlib import Path

import numpy as np

from dmltrain.backends.mxnet.backend import MXNetBackend
from dmltrain.backends.table import BACKENDS
from dmltrain.backends.torch.backend import TorchBackend

FACTORS = [1 + 1e-5, 2.0]  # of the weight in each epoch


def faulty(backend):
    """The backend with this fault in its trainers."""

    class Faulty(backend):
        def trainer(self, network, settings, store, *more):
            trainer, factors = super().trainer(network, settings, store, *more), iter(FACTORS)
            merge = trainer.merge_statistics

            def merge_and_alter(all_reduce, num_workers):  # the last that changes weights in an epoch
                merge(all_reduce, num_workers)
                if store.rank == 1:
                    weight = next(
                        common_array for common_array in trainer.common_arrays() if common_array.name.endswith("weight")
                    )
                    values = np.array(weight.read())
                    values.reshape(-1)[np.abs(values).argmax()] *= next(factors)
                    weight.write(values)

            trainer.merge_statistics = merge_and_alter
            return trainer

    return Faulty()


BACKENDS.update(torch=faulty(TorchBackend), mxnet=faulty(MXNetBackend))
sys.argv.insert(2, "--backend")
runpy.run_path(str(Path(__file__).with_name("own_folder.py")), run_name="__main__")
