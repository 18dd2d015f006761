"""--monitor: the sizes of a network's arrays in the log, as MXNet's Monitor prints them (python/mxnet/monitor.py).

The size of an array is its root mean square: its norm divided by the root of its number of elements.
"""

from __future__ import annotations

from math import sqrt

import numpy as np

from dmltrain.base.arrays import Array
from dmltrain.logs import record
from dmltrain.train.run import Run


def log(run: Run, iteration: int) -> None:
    """Log weights and statistics after this step, in the network's order."""
    run.trainer.settle()
    arrays = {each.name: each.read for each in run.trainer.common_arrays()}
    for parameter in (*run.network.parameters(), *run.network.auxiliary()):
        run.log.info(record.array_size(iteration, parameter.name, size(arrays[parameter.name]())))


def size(array: Array) -> float:
    return float(np.linalg.norm(array.astype(np.float64).ravel())) / sqrt(array.size)
