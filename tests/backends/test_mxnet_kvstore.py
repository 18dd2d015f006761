"""MXNet's kvstores under dmltrain: real jobs of ps-lite, and the workaround for each defect (docs/mxnet.md)."""

import pytest

from dmltrain.backends.mxnet.server import command as mxnet_command
from dmltrain.errors import JobLost, UserError
from tests.running_job import need_mxnet

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
