"""Residuals of workers that leave go to one that stays: without sockets, all workers in one list."""

import numpy as np

from dmltrain.kvstore import codec
from dmltrain.kvstore.view import View
from dmltrain.kvstore.worker.handing_over import HandingOver
from dmltrain.kvstore.worker.sharding import Slice
from dmltrain.kvstore.worker.undo import Undo
from dmltrain.kvstore.worker.worker_slice import WorkerSlice

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
