"""Shared memory inside a host against TCP: the same bits; and no process leaves memory or files behind."""

import os
import signal
from pathlib import Path

import pytest

from dmltrain.kvstore import codec

SHARED = Path("/dev/shm")


def results(start_forked, *arguments, workers=2, servers=1):
    job = start_forked("transport.py", *arguments, workers=workers, servers=servers)
    job.succeed()
    found = [job.results(worker)[-1] for worker in range(workers)]
    assert len({each["digest"] for each in found}) == 1, "all workers get the same"
    return found[0]


def test_shared_memory_and_tcp_give_the_same_bits(start_forked):
    plain = results(start_forked, "tcp", "auto", "none", 1, 7, "")
    shared = results(start_forked, "shm", "auto", "none", 1, 7, "")
    spread = results(start_forked, "auto", "auto", "none", 1, 7, "", servers=3)
    assert plain["digest"] == shared["digest"] == spread["digest"]
    assert plain["error"] < 1e-9 and plain["shared"] == 0
    assert shared["sent"] - shared["shared"] < plain["sent"] / 500, "the socket carries headers only"


ERRORS = {"bf16": 1e-4, "fp16": 1e-4, "int8": 3e-4, "2bit": 0.02}  # the others: 0.1


@pytest.mark.parametrize(
    "kind",
    [pytest.param(each.name, marks=() if each.name == "2bit" else pytest.mark.thorough) for each in codec.TABLE],
)
def test_compression_does_not_depend_on_the_transport(start_forked, kind):
    one, other = (results(start_forked, way, "auto", kind, 1, 4, "", servers=2) for way in ("tcp", "shm"))
    assert one["digest"] == other["digest"]
    assert 0 < one["error"] < ERRORS.get(kind, 0.1)
    values = 370_002
    assert one["sent"] < 4 * codec.make({"type": kind}).nbytes(values) * 1.03, "headers are little"


def test_killing_everything_leaves_nothing(start_forked):
    before = set(os.listdir(SHARED))
    job = start_forked("endless.py", "dist_sync")
    job.wait_for_line("worker-0", "ready")
    for process in job.processes.values():
        process.send_signal(signal.SIGKILL)
    assert set(job.wait().values()) == {-signal.SIGKILL}
    assert set(os.listdir(SHARED)) <= before
