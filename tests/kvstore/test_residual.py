"""The workers' residuals of compression: gathered for a checkpoint, loaded by a resumed job, taken back after an
aborted round, and handed over by workers that leave."""

import random

import numpy as np
import pytest

from dmltrain.errors import UserError
from dmltrain.kvstore import codec
from dmltrain.kvstore.view import View
from dmltrain.kvstore.worker import residual
from dmltrain.kvstore.worker.handing_over import HandingOver
from dmltrain.kvstore.worker.sharding import Slice
from dmltrain.kvstore.worker.undo import Undo
from dmltrain.kvstore.worker.worker_slice import WorkerSlice

TWO_BITS = codec.make({"type": "2bit", "threshold": 1.0})


def slices(*lengths):
    made = [
        WorkerSlice(Slice(0, index, 0, length, 0), np.dtype(np.float32), TWO_BITS, None)
        for index, length in enumerate(lengths)
    ]
    for number, slice_ in enumerate(made):
        slice_.residual[:] = np.arange(slice_.range.length) + 10 * number
    return made


def test_gathered_and_loaded_residuals_are_unchanged_and_those_of_another_worker_added():
    before, after = slices(3, 1, 2), slices(3, 1, 2)
    held = residual.gathered(before)
    assert held.tolist() == [0, 1, 2, 10, 20, 21]
    for slice_ in after:
        slice_.residual[:] = -1
    residual.spread(after, [np.zeros(6, np.float32), held], lambda slice_: [1])
    assert [slice_.residual.tolist() for slice_ in after] == [slice_.residual.tolist() for slice_ in before]
    own, other = slices(3, 1, 2), slices(3, 1, 2)
    residual.add(own, residual.gathered(other))
    assert [slice_.residual.tolist() for slice_ in own] == [[0, 2, 4], [20], [40, 42]]


def test_each_slice_gets_the_sum_of_its_workers():
    """This worker gets the residuals of two workers for the second slice, its own for the first, none for the last."""
    own = slices(2, 2, 2)
    workers = [np.full(6, number, np.float32) for number in (1, 10, 100)]
    residual.spread(own, workers, lambda slice_: {0: [2], 1: [0, 1], 2: []}[slice_.range.index])
    assert [slice_.residual.tolist() for slice_ in own] == [[100, 100], [11, 11], [0, 0]]


@pytest.mark.parametrize("sizes", [[5], [7], [6, 5], [7, 6], []], ids=str)
def test_residuals_of_another_model_are_refused(sizes):
    """NumPy would read the beginning of a longer residual, and stop in the middle of a shorter one."""
    own = slices(3, 3)
    with pytest.raises(
        UserError, match="belong to another model or another compression: continue with the same --network and --gc"
    ):
        residual.spread(own, [np.ones(size, np.float32) for size in sizes], lambda slice_: range(len(sizes)))
    assert [slice_.residual.tolist() for slice_ in own] == [slice_.residual.tolist() for slice_ in slices(3, 3)]


def encode(undo, op):
    undo.keep(op)
    undo.residual += op


def test_random_rounds_leave_what_committed_rounds_have_left_and_a_new_member_begins_at_zero():
    for seed in range(2000):
        chance, undo, committed = random.Random(seed), Undo(np.zeros(3, np.float32)), 0.0
        op = 0
        for _ in range(20):
            op += chance.choice([1, 1, 3])  # between rounds there are other ops
            for _ in range(chance.choice([0, 0, 1, 2])):  # aborted rounds, each ends with a view
                if chance.random() < 0.7:  # else it was not encoded yet
                    encode(undo, op)
                undo.back_to(op - 1)
            encode(undo, op)
            committed += op
            if chance.random() < 0.2:
                undo.back_to(op)
            assert (undo.residual == committed).all(), f"seed {seed}"
    undo = Undo(np.zeros(2, np.float32))
    encode(undo, 7)
    undo.forget()
    assert not undo.residual.any()
    encode(undo, 3)
    undo.back_to(2)
    assert not undo.residual.any()


LENGTHS = (3, 600, 1)


class Entry:
    """A key with one slice."""

    def __init__(self, length, chance, codec_name):
        made = codec.make({"type": codec_name})
        self.slices = [WorkerSlice(Slice(0, 0, 0, length, 0), np.dtype(np.float32), made, None)]
        for slice_ in self.slices if made.needs_residual else ():
            slice_.residual[:] = chance.standard_normal(length)
            slice_.undo = Undo(slice_.residual)


class Entries(list):
    @property
    def undos(self):
        return (slice_.undo for entry in self for slice_ in entry.slices if slice_.undo)

    @property
    def values(self):
        return [slice_.residual.copy() for entry in self for slice_ in entry.slices if slice_.undo]


def handed_over(view, codec_name="int8"):
    """Member -> its residuals before and after the op; and the number of broadcasts."""
    chance = np.random.default_rng(3)
    entries = {each: Entries(Entry(length, chance, codec_name) for length in LENGTHS) for each in view.members}
    before = {each: entries[each].values for each in view.members}
    wire, calls = {}, []

    def broadcast(member):
        def run(values, needed, source):
            calls.append((member, source, needed))
            if member == source:
                wire[source] = values.copy()
            elif needed:
                values[:] = wire[source]

        return run

    members = {each: HandingOver(each, entries[each], broadcast(each)) for each in view.members}
    in_order = sorted(view.members, key=lambda each: each not in view.hands_over)
    taken = {each: members[each].exchange(view) for each in in_order}
    for each in view.members:
        same = map(np.array_equal, before[each], entries[each].values)
        assert codec_name != "int8" or all(same), "nothing changes before it is recognised"
        members[each].settle(view, taken[each])
    return before, {each: entries[each].values for each in view.members}, calls


def test_the_receiver_adds_what_the_others_had_and_they_have_nothing_left():
    view = View(2, 7, ((0, 1), (2, 4)), (0,), joined=(1,), hands_over=(0, 4))
    before, after, _ = handed_over(view)
    for place, length in enumerate(LENGTHS):
        expected = before[2][place] + before[0][place] + before[4][place]
        assert after[2][place].tolist() == expected.tolist()
        assert after[1][place].tolist() == before[1][place].tolist()
        assert after[0][place].tolist() == after[4][place].tolist() == [0.0] * length


def test_only_the_receiver_gets_them_and_without_residuals_nothing_travels():
    view = View(2, 7, ((0, 1), (2,)), (0,), hands_over=(1,))
    assert sorted(handed_over(view)[2]) == [(0, 1, True), (1, 1, False), (2, 1, False)]
    assert handed_over(view, "bf16")[2] == []
    assert handed_over(View(2, 7, ((0, 1), (2,)), (0,), joined=(2,)))[2] == []
