"""MXNet's kvstores under dmltrain: real jobs of ps-lite, and the workaround for each defect (docs/mxnet.md).

How their processes end: those that are killed, freeze or restart are named by all others, and nobody waits for a lost
one, as ps-lite's own store does without limit."""

import functools
import json
import signal
import time

import pytest

from dmltrain.backends.mxnet.server import command as mxnet_command
from dmltrain.base.errors import JobLost, UserError
from tests.forked_job import ForkedJob, forker
from tests.running_job import RunningJob, need_mxnet
from tests.waiting import wait_for

need_mxnet()

PROGRAM = "mxnet_store.py"
LOST = JobLost.exit_code


def momentum_steps(gradient):
    """What two workers' weights are after `steps`' three steps with this total gradient."""
    weight, momentum, found = 1.0, 0.0, []
    for rate in (0.1, 0.1, 1.0):
        momentum = 0.5 * momentum - rate * gradient
        weight += momentum
        found.append(weight)
    return found


def same_everywhere(found, expected):
    """Every element of both keys is `expected` at each step."""
    for step, value in zip(found, expected, strict=True):
        assert step == [[pytest.approx(value, rel=1e-5)] * 2] * 2


@pytest.mark.parametrize(
    ("where", "compression"),
    [
        pytest.param("servers", "", marks=pytest.mark.thorough),
        ("servers", "2bit"),
        pytest.param("workers", "2bit", marks=pytest.mark.thorough),
    ],
)
def test_synchronous_steps_with_a_learning_rate_that_changes(start_forked, where, compression):
    job = start_forked(PROGRAM, "steps", "dist_sync", where, compression, servers=2, backend="mxnet")
    job.succeed()
    total = 1.0 if compression else 3.0  # of gradients 1 and 2; compressed, each is the threshold 0.5
    expected = momentum_steps(total) if where == "servers" else [total] * 3
    answers = [job.results(worker)[0] for worker in (0, 1)]
    for answer in answers:
        same_everywhere(answer["values"], expected)
        assert answer["summed"] == [2.0, 1.0]
        assert sorted(answer["ranks"]) == [0.0, 1.0]
    elements = 3 * (12 + 1_100_000)
    assert elements / 4 < answers[0]["sent"] < elements if compression else answers[0]["sent"] > 4 * elements


def test_a_dist_async_job_steps_at_each_push(start_forked):
    job = start_forked(PROGRAM, "steps", "dist_async", "servers", servers=2, backend="mxnet")
    job.succeed()
    ends = [job.results(worker)[0]["values"][-1] for worker in (0, 1)]
    assert min(low for end in ends for low, _ in end) < -2.0  # both workers' steps have come, with the last rate


def test_numpy_arrays_and_one_value_a_device(start_forked):
    job = start_forked(PROGRAM, "numpy_values", "dist_device_sync", backend="mxnet")
    job.succeed()
    for worker in (0, 1):
        assert job.results(worker) == [{"first": [0.0, 1.0, 2.0, 3.0], "sum": [3.0] * 4}]


def test_a_pull_has_the_value_before_a_later_push_however_late_it_runs(start_forked):
    """In MXNet it has the value after that push."""
    job = start_forked(PROGRAM, "overtaken", workers=1, backend="mxnet")
    job.succeed()
    assert job.results(0) == [{"before": [[-1.0, -1.0]], "after": [[-2.0, -2.0]]}]


@pytest.mark.thorough
def test_optimizer_states_on_the_servers_are_saved_and_loaded(start_forked, tmp_path):
    last = {}
    for mode in ("save", "load"):
        job = start_forked(PROGRAM, "states", "dist_sync", tmp_path / "states", mode, servers=2, backend="mxnet")
        job.succeed()
        last[mode] = job.results(0)[0]["last"]
    assert last["load"] == last["save"]
    (tmp_path / "states.server-1").unlink()
    words = ("states", "dist_sync", tmp_path / "states", "load")
    job = start_forked(PROGRAM, *words, workers=1, servers=2, backend="mxnet")
    assert job.wait()["worker-0"] == UserError.exit_code
    assert "one file for each server" in job.output("worker-0")


@pytest.mark.thorough
def test_an_optimizer_that_needs_whole_weights_is_refused_where_mxnet_divides_them(start_forked):
    """And it is served where MXNet does not, on one server."""
    for servers in (1, 2):
        job = start_forked(PROGRAM, "norms", servers=servers, backend="mxnet")
        codes = job.wait()
        refused = "lamb needs whole weights" in job.outputs() and "1000000" in job.outputs()
        assert refused == (servers == 2), job.outputs()
        assert (set(codes.values()) == {0}) == (servers == 1)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        pytest.param("no-optimizer", "call set_optimizer first", marks=pytest.mark.thorough),
        ("custom-optimizer", "Mine cannot run on the servers"),
        pytest.param("different-shapes", "the same model", marks=pytest.mark.thorough),
    ],
)
def test_a_mistake_is_an_error_at_the_worker_at_once(start_forked, what, message):
    job = start_forked(PROGRAM, "wrong", what, backend="mxnet")
    codes = job.wait()
    assert {UserError.exit_code, LOST} == set(codes.values())
    mistaken = [name for name, code in codes.items() if code == UserError.exit_code]
    assert all(message in job.output(name) for name in mistaken)  # the job may end before the other worker gets there
    assert "Traceback" not in job.outputs()


@pytest.mark.thorough
def test_mistakes_in_a_call_leave_the_store_as_it_was(start_forked):
    job = start_forked(PROGRAM, "mistakes", workers=1, backend="mxnet")
    job.succeed()
    *said, last = job.results(0)
    facts = ("before init", "shape (3, 4), but this array has (4, 3)", "takes float32, but this value is float64")
    names = ("compression-after-init", "shape", "dtype", "rate", "rate-of-a-push")
    for each, name, fact in zip(said, names, (*facts, *["rate is nan"] * 2), strict=True):
        assert each["mistake"] == name and fact in each["error"], each
    same_everywhere([last["values"]], [0.9])


@pytest.mark.thorough  # make test has other mistakes that end the job
def test_workers_with_different_kvstores_get_an_error(start_forked):
    job = start_forked(PROGRAM, "wrong", "different-types", backend="mxnet")
    assert set(job.wait().values()) == {LOST}
    assert "start all with the same --kv-store" in job.output("worker-0")


def test_servers_unpickle_nothing(start_forked):
    job = start_forked(PROGRAM, "wrong", "pickle", backend="mxnet")
    assert set(job.wait().values()) == {LOST}
    assert "refused a command that is not JSON" in job.output("worker-1")
    assert not (job.folder / "unpickled").exists()


@pytest.mark.parametrize(("kind", "value"), [("optimizer", {"name": "sgd"}), ("learning_rate", 0.5)])
def test_commands_survive_encoding_and_decoding(kind, value):
    assert mxnet_command.decode(0, mxnet_command.encode(kind, value).encode()) == (kind, value)


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"\x80\x04", b"[]", b"{}", b"[" * 100000, b'"optimizer"', b'{"os": {}}', b'{"optimizer": 1}'),
        *(b'{"learning_rate": "1"}', b'{"learning_rate": true}', b'{"learning_rate": NaN}'),
        b'{"optimizer": {}, "learning_rate": 1}',
    ],
)
def test_other_commands_are_refused(body):
    with pytest.raises(mxnet_command.Refused):
        mxnet_command.decode(0, body)
    with pytest.raises(mxnet_command.Refused):
        mxnet_command.decode(7, b'{"learning_rate": 1}')


# -- how processes end ------------------------------------------------------------------------------------------------


def lost(job, victim):
    """Wait for the end of all but `victim`: no code is 0."""
    process = job.processes.pop(victim)
    codes = job.wait()
    job.processes[victim] = process
    assert set(codes.values()) == {LOST}, job.outputs()


class OneInterpreter(ForkedJob):
    """Worker 0 is an interpreter of its own, whose end is a real one; the others are forked."""

    def start(self, name, log="", inherited=()):
        start = RunningJob.start if name == "worker-0" else ForkedJob.start
        return start(self, name, log, inherited)


@pytest.fixture
def start_one(start_job):
    return functools.partial(start_job, made=functools.partial(OneInterpreter, forker=forker("mxnet")))


@pytest.fixture
def endless(start_forked):
    job = start_forked(PROGRAM, "endless", "dist_sync", backend="mxnet")
    for worker in ("worker-0", "worker-1"):
        job.wait_for_line(worker, "ready")
    return job


@pytest.mark.parametrize("how", ["close", pytest.param("at exit", marks=pytest.mark.thorough)])
def test_a_finished_worker_does_not_wait_for_a_lost_one(start_one, start_forked, how):
    job = start_one(PROGRAM, "done", how) if how == "at exit" else start_forked(PROGRAM, "done", how, backend="mxnet")
    for worker in ("worker-0", "worker-1"):
        job.wait_for_line(worker, "ready")
    job.processes["worker-1"].kill()
    lost(job, "worker-1")
    assert "worker 1 on" in job.output("worker-0") and "Traceback" not in job.output("worker-0")


@pytest.mark.thorough  # make test has the end by an exception, in launch/test_mxnet_programs.py
@pytest.mark.parametrize(
    "how, code, said", [("exit", 7, "exit code 7"), ("exception", 1, "RuntimeError: a defect of the program")]
)
def test_the_exit_code_of_a_worker_ends_the_job(start_one, how, code, said):
    job = start_one(PROGRAM, "wrong", how)
    codes = job.wait()
    assert codes.pop("worker-0") == code
    assert set(codes.values()) == {LOST}
    assert said in job.output("worker-1")


KILLED = [("worker-1", signal.SIGKILL), ("server-0", signal.SIGKILL), ("scheduler-0", signal.SIGKILL)]


@pytest.mark.thorough  # make test has the worker above
@pytest.mark.parametrize("victim, number", [*KILLED, ("worker-1", signal.SIGSTOP), ("server-0", signal.SIGSTOP)])
def test_a_killed_or_frozen_process_ends_the_job_and_is_named(endless, victim, number):
    began = time.monotonic()
    endless.processes[victim].send_signal(number)
    lost(endless, victim)
    assert number == signal.SIGKILL or time.monotonic() - began > 3.0, "8.5 s without a heartbeat"
    named = "lost the scheduler" if victim == "scheduler-0" else f"{victim.replace('-', ' ')} on"
    assert named in endless.output("worker-0")
    missed = "missed heartbeats" in endless.output("worker-0")
    assert missed == (number == signal.SIGSTOP), "the end of a process is seen at once"


def test_a_restarted_rank_0_changes_no_weights(start_forked):
    """In MXNet the `init` of a restarted rank 0 is added to the weights as a gradient."""
    job = start_forked(PROGRAM, "idle", "dist_sync", backend="mxnet")
    wait_for(lambda: len(job.results(1)) > 5, "results of worker 1")
    hold = job.folder / "hold"
    hold.touch()  # importing MXNet may take longer than the 8.5 s for which a frozen worker 0 counts as slow
    job.processes["second"] = job.start("worker-0", "second")
    job.wait_for_line("second", "loaded")
    job.processes["worker-0"].send_signal(signal.SIGSTOP)
    hold.unlink()
    lost(job, "worker-0")
    assert "worker 0 is already registered" in job.output("second")
    assert {json.dumps(result["values"]) for result in job.results(1)} == {"[[1.0, 1.0], [1.0, 1.0]]"}


def test_the_wait_for_a_worker_that_never_pushes_has_a_deadline(start_forked):
    """ps-lite itself has no deadline."""
    job = start_forked(PROGRAM, "wrong", "uneven", env={"DMLTRAIN_WAIT_TIMEOUT": "3"}, backend="mxnet")
    for worker in ("worker-0", "worker-1"):
        job.wait_for_line(worker, "opened")
    assert set(job.wait().values()) == {LOST}
    assert "worker 0 on" in job.output("worker-1") and "another worker does not push it" in job.output("worker-1")
