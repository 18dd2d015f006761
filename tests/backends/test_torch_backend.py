"""torch.distributed over the servers of a job: dmltrain.torch."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dmltrain.backends.torch.process_group.calls import WAITING_SECONDS, Calls, described
from dmltrain.backends.torch.process_group.sums import least
from dmltrain.kvstore.transport.message.job import ServerAddress, Start, WorkerAddress
from tests.waiting import wait_for

PROGRAM = Path(__file__).parent / "programs/torch_backend.py"
MEMORY, SERVERS = {}, {"DMLTRAIN_TRANSPORT": "tcp"}  # how sums are made on one host


@pytest.fixture
def run(start_forked, tmp_path):
    """`run(function, word, ..., workers=2)` -> the job; its `results` are those of the function."""

    def run(function, *words, workers=2, servers=2, **options):
        return start_forked(
            PROGRAM, function, tmp_path / "meeting", *words, workers=workers, servers=servers, **options
        )

    return run


def said(job, workers=2):
    """What each worker has said, as one dictionary for each."""
    if "server-0" not in job.processes:
        job.processes["scheduler-0"].kill()  # for which nobody asks
        wait_for(lambda: all(process.poll() is not None for process in job.processes.values()), "the end of the job")
    else:
        job.wait()
    return [{key: value for row in job.results(rank) for key, value in row.items()} for rank in range(workers)]


@pytest.mark.parametrize(
    ("function", "workers", "servers", "way"),
    [
        ("all_reduces", 2, 1, MEMORY),
        ("all_reduces", 3, 1, MEMORY),
        ("all_reduces", 3, 2, SERVERS),
        ("all_reduces", 2, 0, MEMORY),
        ("collectives", 3, 2, MEMORY),
        ("collectives", 2, 1, SERVERS),
        ("collectives", 2, 0, MEMORY),
    ],
)
def test_collectives_have_the_results_of_gloo(run, function, workers, servers, way):
    for found in said(run(function, workers=workers, servers=servers, env=way), workers):
        assert found == {"wrong": []}


@pytest.mark.parametrize("way", [MEMORY, SERVERS], ids=["memory", "servers"])
def test_many_sums_are_under_way_at_once(run, way):
    for found in said(run("works", env=way)):
        assert found == {"right": True, "complete": True, "result": 1.0, "future": 1.0}


def test_groups_of_fewer_workers_and_a_second_default_group(run):
    found = said(run("groups", workers=3), 3)
    assert [each["few"] for each in found] == [1.0, 1.0, 2.0]
    assert all(each["world"] == each["again"] == 3.0 and each["name"] == "dmltrain" for each in found)


@pytest.mark.parametrize("way", [MEMORY, SERVERS], ids=["memory", "servers"])
def test_ddp_trains_as_over_gloo_and_its_gradients_go_over_dmltrain(run, way):
    for found in said(run("ddp", env=way)):
        assert found["same"]
        assert found["sent"] > 3 * 4 * 2 * 300 * 300, "the two large layers, in three exchanges"


@pytest.mark.parametrize(("word", "why"), [("over gloo", "no process group of dmltrain"), ("small", "64 KiB or more")])
def test_a_job_whose_servers_had_nothing_to_do_says_so_once(run, word, why):
    job = run("unused", word, servers=1, env=SERVERS)
    workers = [job.processes[f"worker-{rank}"] for rank in range(2)]
    wait_for(lambda: all(worker.poll() is not None for worker in workers), "the end of the workers")
    note = "dmltrain: worker 0: no byte went over the servers: "
    assert [job.output(f"worker-{rank}").count(note) for rank in range(2)] == [1, 0]
    assert why in job.output("worker-0")


@pytest.mark.parametrize(
    ("kind", "way", "said"),
    [
        ("another collective", MEMORY, ["broadcast of float32 (7,) (", "all_reduce of float32 (40000,) ("]),
        ("another size", MEMORY, ["different sizes"]),
        ("another size", SERVERS, ["declares key"]),
        ("another size in the same pieces", SERVERS, ["different sizes"]),
        ("another size over gloo", SERVERS, ["Detected mismatch between collectives"]),
        ("aborted", MEMORY, ["worker 1 has aborted its process group"]),
        ("killed", MEMORY, ["worker 1", "lost"]),
        ("stopped", MEMORY, ["worker 1", "missed heartbeats"]),
        ("stopped before a sum", MEMORY, ["worker 1", "missed heartbeats"]),
        ("stopped before a sum", SERVERS, ["worker 1", "missed heartbeats"]),
        ("late", MEMORY, ["worker 0 has waited for 7 s in all_reduce of float32 (40000,) (", "which worker 1 did not"]),
    ],
)
def test_a_fault_is_named_by_the_collective_that_waits(run, kind, way, said):
    detail = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"} if kind == "another size over gloo" else {}  # else gloo ends it
    job = run("fault", kind, env={"DMLTRAIN_HEARTBEAT_TIMEOUT": "4", **way, **detail})
    wait_for(lambda: job.processes["worker-0"].poll() is not None, "the end of worker 0")
    assert job.processes["worker-0"].poll() != 0
    assert all(words in job.output("worker-0") for words in said), job.output("worker-0")
    job.processes["worker-1"].kill()


@pytest.mark.parametrize(
    ("function", "environment", "said"),
    [
        ("contradicts", {}, "init_process_group was told rank 1 of 2"),
        ("all_reduces", {"DMLTRAIN_WIRE": "auth"}, "not those of gloo"),
    ],
)
def test_what_cannot_be_right_is_refused(run, function, environment, said):
    job = run(function, env=environment)
    wait_for(lambda: all(job.processes[f"worker-{rank}"].poll() is not None for rank in range(2)), "both workers' end")
    assert said in job.output("worker-0")


ONE, TWO = torch.zeros(1), torch.zeros(2)


@pytest.mark.parametrize(
    ("calls", "differ"),
    [
        ([("all_reduce", [ONE]), ("all_reduce", [ONE])], False),
        ([("all_reduce", [ONE]), ("all_reduce", [TWO])], True),
        ([("all_reduce", [ONE]), ("broadcast", [ONE])], True),
        ([("scatter", [ONE, ONE, ONE]), ("scatter", [ONE])], False),
        ([("all_to_all_single", [ONE, TWO]), ("all_to_all_single", [TWO, ONE])], False),
        ([("gather", [ONE]), ("scatter", [ONE])], True),
    ],
)
def test_calls_that_wait_are_compared_as_far_as_they_must_be_the_same(calls, differ):
    now, store = [0.0], dist.HashStore()
    workers = [Calls(store, rank, [0, 1], lambda: now[0]) for rank in range(2)]
    for worker, (name, tensors) in zip(workers, calls, strict=True):
        worker.begin(described(name, tensors))
    assert [worker.difference() for worker in workers] == ["", ""], "they have not waited"
    now[0] += WAITING_SECONDS
    first, second = (worker.difference() for worker in workers)
    assert (first, bool(second)) == ("", differ), "the first one has read before the second one has written"


@pytest.mark.parametrize(
    ("limit", "seconds", "called", "said"),
    [(5.0, 4.9, 1, ""), (5.0, 5.0, 1, "for 5 s in all_reduce ("), (0.0, 1e9, 1, "")]
    + [(9.0, 9.0, 2, "which worker 6 did not call: init_process_group(timeout=...) sets"), (9.0, 9.0, 3, "): init_")],
)
def test_a_sum_waits_no_longer_than_the_limit_of_its_group(limit, seconds, called, said):
    now, store = [0.0], dist.HashStore()
    workers = [Calls(store, rank, [2, 4, 6], lambda: now[0]) for rank in range(3)]
    for worker in workers[:called]:
        worker.begin("all_reduce", limit)
    now[0] = seconds
    assert [worker.difference() for worker in workers] == [""] * 3
    assert said in workers[0].overdue() and bool(said) == bool(workers[0].overdue())


@pytest.mark.parametrize(
    ("hosts", "bytes_"),
    [(("a", "a", "a"), 1 << 20), (("a", "b", "a"), 1 << 16), (("", ""), 1 << 16), (("a",), 1 << 20)],
)
def test_from_which_size_on_the_servers_are_faster(hosts, bytes_):
    servers = (ServerAddress("10.0.0.9", 1, "", "z", ""),)
    assert least(Start(servers, tuple(WorkerAddress("", name) for name in hosts))) == bytes_
