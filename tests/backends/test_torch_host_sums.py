"""Sums of one host's workers in the memory that they share. Workers are threads, each with its own mapping."""

import os
import threading

import numpy as np
import pytest
from torch import distributed as dist

from dmltrain.backends.torch.process_group import host_memory
from dmltrain.backends.torch.process_group.host_memory import SLOT_BYTES, SLOTS, WRAP, HostMemory
from dmltrain.backends.torch.process_group.host_sums import WHOLE_BYTES, HostSums, Sum
from dmltrain.base.errors import JobLost


class Worker:
    def __init__(self, memory):
        self.memory, self.sums = memory, HostSums(memory)

    def begin(self, values, factor=1.0):
        """An event that is set at the end of the sum, and what it ended with."""
        ended, errors = threading.Event(), []
        self.sums.start(Sum(values, factor, lambda error: (errors.append(error), ended.set())))
        return ended, errors


def workers_of(count, lost=lambda: "", limit=60.0):
    descriptor = os.memfd_create("sums")
    os.ftruncate(descriptor, host_memory._size(count))
    return [Worker(HostMemory(descriptor, rank, count, lost, limit)) for rank in range(count)]


def ends(begun):
    assert all(ended.wait(60) for ended, _ in begun)
    return [errors for _, errors in begun]


PIECE = SLOT_BYTES // 8  # elements of float64
SIZES = (1, 5, WHOLE_BYTES // 8, WHOLE_BYTES // 8 + 1, 5000, PIECE - 1, PIECE, PIECE + 1, (SLOTS + 2) * PIECE + 3)


@pytest.mark.parametrize("count", [2, 3, 8])
@pytest.mark.parametrize(("dtype", "factor"), [(np.float32, 1.0), (np.float64, 0.3)])
def test_sums_are_those_of_numpy_in_the_order_of_ranks(count, dtype, factor):
    """Sums of all sizes are under way at once, and the counters wrap around meanwhile."""
    workers, draw = workers_of(count), np.random.default_rng(count)
    for worker in workers:
        worker.sums._made = WRAP - 3
        worker.memory._words[:] = memoryview(np.full(len(worker.memory._words), WRAP - 3, np.uint32))
    given = [[draw.standard_normal(size).astype(dtype) for size in SIZES] for _ in workers]
    expected = []
    for each in zip(*given, strict=True):
        total = each[0].copy()
        for more in each[1:]:
            total += more
        expected.append(total * dtype(factor))
    begun = [worker.begin(values, factor) for worker, own in zip(workers, given, strict=True) for values in own]
    assert ends(begun) == [[None]] * len(begun)
    for own in given:
        assert all(map(np.array_equal, own, expected))


@pytest.mark.parametrize("sizes", [(7, 8), (5000, 5001), (PIECE, 2 * PIECE)])
def test_other_sizes_or_types_on_another_worker_are_an_error_of_both_and_of_all_later_sums(sizes):
    workers = workers_of(2)
    begun = [worker.begin(np.zeros(size)) for worker, size in zip(workers, sizes, strict=True)]
    begun += [worker.begin(np.zeros(3)) for worker in workers]
    for (error,) in ends(begun):
        assert isinstance(error, JobLost) and "different sizes" in str(error)
    assert isinstance(ends([workers[0].begin(np.zeros(3))])[0][0], JobLost)


@pytest.mark.parametrize(
    ("lost", "limit", "why"), [("worker 1 is lost", 60.0, "worker 1 is lost"), ("", 0.3, "worker 1 has not called")]
)
def test_a_sum_that_waits_ends_when_the_job_is_lost_or_its_limit_is_over(lost, limit, why):
    ((error,),) = ends([workers_of(2, lambda: lost, limit)[0].begin(np.zeros(9))])
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
