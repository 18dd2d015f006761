"""torch.distributed over the servers of a job: dmltrain.torch, its communication hooks, and scripts that are not
changed, with --torch-backend dmltrain and with torchrun. And scripts with dmltrain.distribute train as in one process,
or they are refused before the first wrong step."""

import itertools
import os
import pickle
import re
import secrets
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dmltrain.backends.torch import process_group
from dmltrain.backends.torch.process_group import beside, hooks
from dmltrain.backends.torch.process_group.calls import WAITING_SECONDS, Calls, described
from dmltrain.backends.torch.process_group.sums import least
from dmltrain.base.errors import UserError
from dmltrain.kvstore import codec as codecs
from dmltrain.kvstore.transport.message.job import ServerAddress, Start, WorkerAddress
from tests.backends.everyday.run import OPTIONS
from tests.forked_job import forker
from tests.launch.conftest import carriers
from tests.running_job import ROOT
from tests.waiting import wait_for

PROGRAMS = Path(__file__).parent / "programs"
SCRIPTS = ROOT / "tests/programs/torch_scripts"
IN_PLACE = ROOT / "dmltrain/torch/__main__.py"  # python -m dmltrain.torch
COMPILER = "torch._dynamo"  # DistributedDataParallel and some steps import it, which takes as long as torch itself
MEMORY, SERVERS = {}, {"DMLTRAIN_TRANSPORT": "tcp"}  # how sums are made on one host


@pytest.fixture
def start(start_forked):
    """As start_forked, for programs with DistributedDataParallel."""

    def start(program, *words, **options):
        return start_forked(program, *words, modules=(COMPILER,), **options)

    return start


@pytest.fixture
def run(start, tmp_path):
    """`run(function, word, ..., workers=2)` -> the job; its `results` are those of the function."""

    def run(function, *words, workers=2, servers=2, **options):
        given = {"workers": workers, "servers": servers, **options}
        return start(PROGRAMS / "torch_backend.py", function, tmp_path / "meeting", *words, **given)

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
    ("workers", "servers", "way"), [(2, 1, MEMORY), (3, 1, MEMORY), (3, 2, SERVERS), (2, 1, SERVERS), (2, 0, MEMORY)]
)
def test_collectives_have_the_results_of_gloo(run, workers, servers, way):
    for found in said(run("collectives", workers=workers, servers=servers, env=way), workers):
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
    job = run("ddp", env=way)
    for found in said(job):
        assert found["same"]
        assert found["sent"] > 3 * 4 * 2 * 300 * 300, "the two large layers, in three exchanges"
    causes = r"dmltrain: worker 0: \d+ MB summed; s of waits for sums: own-host=\S+ wire=\S+ server=\S+ straggler=\S+\n"
    shown = [len(re.findall(causes, job.output(f"worker-{rank}"))) for rank in range(2)]
    assert shown == ([1, 0] if way == SERVERS else [0, 0]), job.outputs()


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
        ("another collective", MEMORY, ["broadcast (root 0) of float32 (7,) (", "(SUM) of float32 (40000,) ("]),
        ("another reduction", SERVERS, ["all_reduce (MAX) of float32 (40000,) (", "(SUM) of float32 (40000,) ("]),
        ("another size", MEMORY, ["all_reduce (SUM) of float32 (120000,) (", "(SUM) of float32 (40000,) ("]),
        ("another size", SERVERS, ["all_reduce (SUM) of float32 (120000,) (", "(SUM) of float32 (40000,) ("]),
        ("another size in the same pieces", SERVERS, ["different sizes"]),
        ("another size over gloo", SERVERS, ["Detected mismatch between collectives"]),
        ("aborted", MEMORY, ["worker 1 has aborted its process group"]),
        ("killed", MEMORY, ["worker 1", "lost"]),
        ("stopped", MEMORY, ["worker 1", "missed heartbeats"]),
        ("stopped before a sum", MEMORY, ["worker 1", "missed heartbeats"]),
        ("stopped before a sum", SERVERS, ["worker 1", "missed heartbeats"]),
        (
            "late",
            MEMORY,
            ["worker 0 has waited for 7 s in all_reduce (SUM) of float32 (40000,) (", "which worker 1 did not"],
        ),
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
        ("collectives", {"DMLTRAIN_WIRE": "auth"}, "not those of gloo"),
    ],
)
def test_what_cannot_be_right_is_refused(run, function, environment, said):
    job = run(function, env=environment)
    wait_for(lambda: all(job.processes[f"worker-{rank}"].poll() is not None for rank in range(2)), "both workers' end")
    assert said in job.output("worker-0")


def options(kind, **values):
    made = getattr(dist, f"{kind}Options")()
    for name, value in values.items():
        setattr(made, name, value)
    return made


ONE, TWO = torch.zeros(1), torch.zeros(2)
MAX, MIN = (options("Reduce", reduceOp=each) for each in (dist.ReduceOp.MAX, dist.ReduceOp.MIN))


@pytest.mark.parametrize(
    ("calls", "differ"),
    [
        ([("all_reduce", [ONE]), ("all_reduce", [ONE])], False),
        ([("all_reduce", [ONE]), ("all_reduce", [TWO])], True),
        ([("all_reduce", [ONE]), ("broadcast", [ONE])], True),
        ([("scatter", [ONE, ONE, ONE]), ("scatter", [ONE])], False),
        ([("all_to_all_single", [ONE, TWO]), ("all_to_all_single", [TWO, ONE])], False),
        ([("gather", [ONE]), ("scatter", [ONE])], True),
        ([("reduce", [ONE], MAX), ("reduce", [ONE], MAX)], False),
        ([("reduce", [ONE], MAX), ("reduce", [ONE], MIN)], True),
        ([("gather", [ONE], options("Gather", rootRank=rank)) for rank in (0, 1)], True),
    ],
)
def test_calls_that_wait_are_compared_as_far_as_they_must_be_the_same(calls, differ):
    now, store = [0.0], dist.HashStore()
    workers = [Calls(store, rank, [0, 1], lambda: now[0]) for rank in range(2)]
    for worker, call in zip(workers, calls, strict=True):
        worker.begin(described(*call))
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


# -- communication hooks of DistributedDataParallel: dmltrain.torch.hooks ---------------------------------------------

HOOKS = PROGRAMS / "torch_hooks.py"
REFUSED = (
    "needs servers, and a group with all workers of the job: start the job with -s 1",
    "register_comm_hook(int, ...): expected dmltrain.torch.hooks.State() or None",
    "needs dmltrain's servers, this group has the backend gloo",
)


def test_means_are_those_of_one_process_with_the_same_codec_and_fewer_bytes_travel(start, tmp_path):
    names = ("none", "bf16", "int8", "2bit", "topk")
    job = start(HOOKS, tmp_path / "meeting", *names, workers=2, servers=2)
    job.succeed()
    for rank in range(2):
        rows = iter(job.results(rank)[len(REFUSED) :])
        for name in names:
            for turn in range(2 if name == "topk" else 1):
                row = next(rows)
                assert row.pop("coded") == (0 if name == "none" else 2), (name, row)
                assert row == {"turn": turn, "right": True, "kept": True, "same": True, "coded there": 0}, name
            share, expected = next(rows)["share"], {**codecs.size_ratios(), "topk": 0.02}[name]
            assert name == "none" or share < 1.02 * expected + 0.01, (name, share)
        assert all(words in row["refused"] for words, row in zip(REFUSED[1:], job.results(rank)[1:], strict=False))


def test_hooks_and_states_are_pickled_before_there_is_a_group():
    for hook in (hooks.none, hooks.bf16, hooks.fp16, hooks.int8, hooks.two_bit, hooks.topk):
        assert pickle.loads(pickle.dumps(hook)) is hook
    assert pickle.loads(pickle.dumps(hooks.State(ratio=0.5)))._parameters == {"ratio": 0.5, "threshold": None}


def test_a_hook_without_servers_is_refused(start, tmp_path):
    job = start(HOOKS, tmp_path / "meeting", workers=1, servers=0)
    assert job.processes["worker-0"].wait(120) == 0
    assert all(words in row["refused"] for words, row in zip(REFUSED, job.results(0), strict=True))


# -- scripts of torch.distributed that are not changed ----------------------------------------------------------------


def meeting():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def environment(store, rank):
    """As torchrun's, which has a store for its workers."""
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": store.port}
    return {
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        **{k: str(v) for k, v in places.items()},
    }


def run_alone(folder, *command):
    """Two workers without a launcher of ours: their exit codes and outputs, when nothing is left of them."""
    store, mark = meeting(), secrets.token_hex(8)
    logs = [folder / f"alone-{rank}.log" for rank in range(2)]
    own = [{**os.environ, **environment(store, rank), "TEST_MARK": mark} for rank in range(2)]
    started = [
        forker("torch", COMPILER).fork([*map(str, command)], each, log, folder)
        for each, log in zip(own, logs, strict=True)
    ]
    codes = [process.wait(120) for process in started]
    wait_for(lambda: not carriers(f"TEST_MARK={mark}"), "the end of what they have started")
    return codes, [log.read_text() for log in logs]


@pytest.mark.parametrize(
    ("script", "asked", "gloo"),
    [
        ("nano_gpt.py", '"gloo"', ()),
        ("classification.py", '"nccl"', ("--dist-backend", "gloo")),
        ("timm_train.py", "", ()),
    ],
)
def test_losses_are_those_over_gloo_and_no_line_is_changed(start, tmp_path, script, asked, gloo):
    store = meeting()
    ranks = {f"worker-{rank}": environment(store, rank) for rank in range(2)}
    job = start(IN_PLACE, SCRIPTS / script, place=lambda name: ([], ranks.get(name, {})))
    job.succeed()
    said, *losses = job.output("worker-0").splitlines()
    assert said == f'dmltrain: init_process_group({asked}) takes the backend "dmltrain"', job.outputs()
    alone = run_alone(tmp_path, PROGRAMS / "gloo_alone.py", SCRIPTS / script, *gloo)
    assert losses and alone == ([0, 0], ["\n".join([*losses, ""]), ""])
    assert not [name for name in ("worker-1", "server-0") if job.output(name)], job.outputs()


def test_prepare_makes_the_group_beside_another_launcher_and_unused_servers_are_noted(tmp_path):
    codes, outputs = run_alone(tmp_path, PROGRAMS / "torch_alone.py", "unused")
    assert codes == [0, 0] and outputs[0].count("gloo made all sums: init_process_group(") == 1, outputs
    assert not outputs[1]


@pytest.mark.parametrize(("killed", "codes"), [(None, [0, 0]), (0, [-9, 1]), (1, [1, -9])])
def test_servers_run_beside_the_workers_of_another_launcher_and_end_with_them(tmp_path, killed, codes):
    found, outputs = run_alone(tmp_path, PROGRAMS / "torch_alone.py", killed)
    assert found == codes, outputs
    summed = outputs if killed is None else [outputs[killed]]  # the other one may not have got the sum before
    assert all("sum 2.0 True" in each for each in summed), "it has gone over the servers"
    if killed is not None:
        assert "DistBackendError" in outputs[1 - killed] and f"worker {killed}" in outputs[1 - killed], outputs


@pytest.mark.parametrize(
    ("words", "own", "said"),
    [
        ("here, but not for worker 0", b"ab", "cd"),
        ("not set here, but for worker 0", b"", ""),
    ],
)
def test_all_workers_have_the_key_of_their_user_or_none(tmp_path, monkeypatch, words, own, said):
    (tmp_path / "key").write_bytes(own)
    monkeypatch.setenv("DMLTRAIN_KEY_FILE", str(tmp_path / "key") if own else "")
    with pytest.raises(UserError, match=words):
        beside._key(said)
    assert beside._key("" if own else "cd") == (own or b"cd")


def test_protection_is_refused_before_servers_start(monkeypatch):
    monkeypatch.setenv("DMLTRAIN_WIRE", "tls")
    with pytest.raises(UserError, match="not those of gloo"):
        process_group.joined(pytest.fail, 0, 2, dist.HashStore())


def test_the_address_of_worker_0_must_be_one_that_other_hosts_reach(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    workers = [{"identity": name, "address": "127.0.0.1"} for name in ("a", "b")]
    with pytest.raises(UserError, match="MASTER_ADDR=localhost is 127.0.0.1 on its own host"):
        beside._begin(workers)


# -- scripts with dmltrain.distribute as users write them (tests/backends/everyday/), beside plain torch --------------


RACES, SECONDS = 30, 3600.0
CHOSEN = list(zip(itertools.cycle(["shm", "tcp"]), OPTIONS, strict=False))
OTHERS = [case for case in itertools.product(["shm", "tcp"], OPTIONS) if case not in CHOSEN]


def found(job):
    """What both workers have found of each case."""
    job.succeed(SECONDS)
    one, other = ({result["case"]: result["found"] for result in job.results(worker)} for worker in range(2))
    assert one.keys() == other.keys()
    return {name: {one[name], other[name]} for name in one}


def wrong(cases):
    return {name: said for name, said in cases.items() if said != {"right"}}


@pytest.mark.parametrize(
    "transport, on", [*CHOSEN, *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in OTHERS)]
)
def test_workers_train_what_one_process_trains(start, transport, on):
    cases = found(start("everyday.py", on, env={"DMLTRAIN_TRANSPORT": transport}))
    assert cases and wrong(cases) == {}


@pytest.mark.exhaustive
@pytest.mark.timeout(0)
@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_it_does_not_matter_who_is_faster(start, transport):
    cases = found(start("everyday.py", "workers", RACES, env={"DMLTRAIN_TRANSPORT": transport}))
    assert len(cases) > 5 and wrong(cases) == {}
