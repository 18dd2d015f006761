"""Collectives of one host's workers in the memory that they share. Workers are threads, each with its own mapping."""

import functools
import os
import threading

import numpy as np
import pytest
from torch import distributed as dist

from dmltrain.backends.torch.process_group import host_memory
from dmltrain.backends.torch.process_group.host_collectives import (
    WHOLE_BYTES,
    Broadcast,
    Gather,
    HostCollectives,
    ScatteredSum,
    Sum,
)
from dmltrain.backends.torch.process_group.host_memory import SLOT_BYTES, SLOTS, WRAP, HostMemory
from dmltrain.base.errors import JobLost


class Worker:
    def __init__(self, memory):
        self.memory, self.collectives = memory, HostCollectives(memory, cause_seconds=0.0)

    def begin(self, kind, *words):
        """An event that is set at the end of the operation, and what it ended with."""
        ended, errors = threading.Event(), []
        self.collectives.start(kind(lambda error: (errors.append(error), ended.set()), *words))
        return ended, errors


def workers_of(count, lost=lambda: "", limit=60.0):
    descriptor = os.memfd_create("sums")
    os.ftruncate(descriptor, host_memory._size(count))
    return [Worker(HostMemory(descriptor, rank, count, lost, limit)) for rank in range(count)]


def ends(begun):
    assert all(ended.wait(60) for ended, _ in begun)
    return [errors for _, errors in begun]


def wrap_soon(worker):
    worker.collectives._made = WRAP - 3
    worker.memory._words[:] = memoryview(np.full(len(worker.memory._words), WRAP - 3, np.uint32))


PIECE = SLOT_BYTES // 8  # elements of float64
SIZES = (1, 5, WHOLE_BYTES // 8, WHOLE_BYTES // 8 + 1, 5000, PIECE - 1, PIECE, PIECE + 1, (SLOTS + 2) * PIECE + 3)


@pytest.mark.parametrize("count", [2, 3, 8])
@pytest.mark.parametrize(("dtype", "factor"), [(np.float32, 1.0), (np.float64, 0.3)])
def test_sums_are_those_of_numpy_in_the_order_of_ranks(count, dtype, factor):
    """Sums of all sizes are under way at once, and the counters wrap around meanwhile."""
    workers, draw = workers_of(count), np.random.default_rng(count)
    for worker in workers:
        wrap_soon(worker)
    given = [[draw.standard_normal(size).astype(dtype) for size in SIZES] for _ in workers]
    expected = []
    for each in zip(*given, strict=True):
        total = each[0].copy()
        for more in each[1:]:
            total += more
        expected.append(total * dtype(factor))
    begun = [worker.begin(Sum, values, factor) for worker, own in zip(workers, given, strict=True) for values in own]
    assert ends(begun) == [[None]] * len(begun)
    for own in given:
        assert all(map(np.array_equal, own, expected))


@pytest.mark.parametrize("count", [2, 3, 8])
def test_other_collectives_move_or_add_what_they_should(count):
    """Of all sizes and in turns, all under way at once."""
    workers, draw = workers_of(count), np.random.default_rng(count)
    begun, checks = [], []
    for worker in workers:
        wrap_soon(worker)
    for root, size in enumerate((0, *SIZES, *(SLOT_BYTES // 8 // count + each for each in (-20, 0, 20)))):
        given = draw.integers(0, 255, (count, size), np.uint8)
        own, parts = given.copy(), np.zeros((count, count, size), np.uint8)
        floats, sums = (
            draw.standard_normal((count, count, size)).astype(np.float32),
            np.zeros((count, size), np.float32),
        )
        in_place = floats.copy()
        for rank, worker in enumerate(workers):
            begun += [
                worker.begin(Broadcast, own[rank], root % count),
                worker.begin(Gather, given[rank], list(parts[rank])),
                worker.begin(ScatteredSum, sums[rank], list(floats[rank]), 0.5),
                worker.begin(ScatteredSum, in_place[rank][rank], list(in_place[rank])),
            ]
        checks.append((root % count, given, own, parts, floats, sums, in_place))
    assert ends(begun) == [[None]] * len(begun)
    for root, given, own, parts, floats, sums, in_place in checks:
        assert (own == given[root]).all() and (parts == given).all()
        for rank in range(count):
            total = functools.reduce(np.add, floats[:, rank])
            assert np.array_equal(sums[rank], total * np.float32(0.5)) and np.array_equal(in_place[rank][rank], total)


@pytest.mark.parametrize(
    "words",
    [
        *(
            [(Sum, np.zeros(size)), (Sum, np.zeros(other))]
            for size, other in [(7, 8), (5000, 5001), (PIECE, 2 * PIECE)]
        ),
        [(Sum, np.zeros(8)), (Sum, np.zeros(16, np.float32))],
        [(Sum, np.zeros(8)), (Gather, np.zeros(64, np.uint8), [np.zeros(64, np.uint8)] * 2)],
    ],
)
def test_another_call_on_another_worker_is_an_error_of_both_and_of_all_later_ones(words):
    workers = workers_of(2)
    begun = [worker.begin(*each) for worker, each in zip(workers, words, strict=True)]
    begun += [worker.begin(Sum, np.zeros(3)) for worker in workers]
    for (error,) in ends(begun):
        assert isinstance(error, JobLost) and "different calls" in str(error)
    assert isinstance(ends([workers[0].begin(Sum, np.zeros(3))])[0][0], JobLost)


@pytest.mark.parametrize(
    ("lost", "limit", "why"),
    [("worker 1 is lost", 60.0, "worker 1 is lost"), ("", 0.3, "worker 1 has not made this call")],
)
def test_a_sum_that_waits_ends_when_the_job_is_lost_or_its_limit_is_over(lost, limit, why):
    ((error,),) = ends([workers_of(2, lambda: lost, limit)[0].begin(Sum, np.zeros(9))])
    assert isinstance(error, JobLost) and why in str(error)


@pytest.mark.parametrize("refuses", [None, 0, 1])
def test_all_workers_have_the_memory_or_none(refuses):
    found, store = {}, dist.HashStore()

    def one(rank):
        found[rank] = host_memory.shared(store, rank, 2, rank != refuses, lambda: "", 60.0)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [bool(found[rank]) for rank in range(2)] == [refuses is None] * 2
