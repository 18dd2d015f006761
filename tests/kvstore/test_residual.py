"""What compression holds back in the workers: gathered for a checkpoint, and given back to whoever goes on with it."""

import numpy as np
import pytest

from dmltrain.errors import UserError
from dmltrain.kvstore import codec
from dmltrain.kvstore.worker import residual
from dmltrain.kvstore.worker.server_link import Part
from dmltrain.kvstore.worker.sharding import Slice

TWO_BITS = codec.make({"type": "2bit", "threshold": 1.0})


def parts(*lengths):
    made = [
        Part(Slice(0, index, 0, length, 0), np.dtype(np.float32), TWO_BITS, None)
        for index, length in enumerate(lengths)
    ]
    for number, part in enumerate(made):
        part.residual[:] = np.arange(part.piece.length) + 10 * number
    return made


def test_gathered_and_spread_is_what_it_was():
    before, after = parts(3, 1, 2), parts(3, 1, 2)
    held = residual.gathered(before)
    assert held.tolist() == [0, 1, 2, 10, 20, 21]
    for part in after:
        part.residual[:] = -1
    residual.spread(after, [np.zeros(6, np.float32), held], lambda part: [1])
    assert [part.residual.tolist() for part in after] == [part.residual.tolist() for part in before]


def test_each_part_gets_the_sum_of_its_workers():
    """Of the second slice this worker keeps what two held back; of the first its own; of the last nothing."""
    own = parts(2, 2, 2)
    workers = [np.full(6, number, np.float32) for number in (1, 10, 100)]
    residual.spread(own, workers, lambda part: {0: [2], 1: [0, 1], 2: []}[part.piece.index])
    assert [part.residual.tolist() for part in own] == [[100, 100], [11, 11], [0, 0]]


@pytest.mark.parametrize("sizes", [[5], [7], [6, 5], [7, 6], []], ids=str)
def test_another_models_is_refused(sizes):
    """Numpy would take a longer one's beginning, and stop half way in a shorter one."""
    own = parts(3, 3)
    with pytest.raises(UserError, match="of another model or compression: continue with the same --network and --gc"):
        residual.spread(own, [np.ones(size, np.float32) for size in sizes], lambda part: range(len(sizes)))
    assert [part.residual.tolist() for part in own] == [part.residual.tolist() for part in parts(3, 3)]
