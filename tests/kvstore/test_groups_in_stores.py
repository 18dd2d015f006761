"""Many small keys in one call: whole stores, through shared memory and over TCP."""

import numpy as np
import pytest

from dmltrain.kvstore.base import READ
from dmltrain.kvstore.server import optimizer_state
from launch.certificate import new

SIZES = (5, 0, 20_000, 1, 7, 70_000, 12)
KEYS = [f"k{number}" for number in range(len(SIZES))]


@pytest.fixture
def run_job(whole_job):
    """Runs `train(store, job)` on the workers of a job. Returns the job."""

    def run(train, **options):
        job = whole_job(**({"servers": 1} | options))
        job.all(lambda store: train(store, job))
        return job

    return run


both = pytest.mark.parametrize("transport", ["shm", "tcp"])


def gradients(rank, step, dtype=np.float32):
    made = [np.random.default_rng([rank, step, number]).standard_normal(size) for number, size in enumerate(SIZES)]
    return [each.astype(np.float64 if number % 3 == 1 else dtype) for number, each in enumerate(made)]


def total(step, workers=2):
    parts = [gradients(rank, step) for rank in range(workers)]
    return [sum(each[1:], each[0]) for each in zip(*parts, strict=True)]


def like(value=1.0):
    """Arrays of the keys' sizes."""
    return [np.full_like(each, value) for each in gradients(0, 0)]


def same(found, expected):
    return all(map(np.array_equal, found, expected)) and len(found) == len(expected)


def in_lockstep(job):
    return [each for server in job.servers for each in server._service._core.groups.in_lockstep()]


@both
@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("how", ["own", "buffers", "read"])
def test_the_values_of_every_step_are_right(run_job, transport, mean, how):
    def train(store, _):
        store.init(KEYS, like(0.0), mean=mean)
        buffers = store.buffers(KEYS)
        for step in range(6):
            pushed, wanted = gradients(store.rank, step), total(step)
            if how != "own":
                for buffer, gradient in zip(buffers, pushed, strict=True):
                    buffer[:] = gradient
                pushed = buffers
            out = READ if how == "read" else like(9.0)
            handle = store.pushpull(KEYS, pushed, out, priority=step % 2)
            found = handle.values if how == "read" else out
            assert same(found, [each * each.dtype.type(0.5) for each in wanted] if mean else wanted)
            assert [each.dtype for each in found] == [each.dtype for each in wanted]
            assert not (how == "read" and any(each.flags.writeable for each in found))
        assert min(store.bytes_received, store.bytes_sent) > 5 * sum(each.nbytes for each in pushed)
        assert store.take_staleness() == 0.0

    job = run_job(train, transport=transport)
    assert [len(each.members) for each in in_lockstep(job)] == [6], "all but the largest"


@both
def test_a_call_may_be_grouped_or_not_and_pushed_apart_from_its_pull(run_job, transport):
    """The workers do not agree on how, and change it."""

    def train(store, _):
        store.init(KEYS, like(0.0))
        calls = [KEYS, KEYS[::-1], KEYS[:3], ["k0"]]
        for step in range(12):
            pushed, out = gradients(store.rank, step), like()
            first = calls[(step // 3 + store.rank) % len(calls)] if step > 2 else KEYS
            for names in (first, [each for each in KEYS if each not in first]):
                store.push(names, [pushed[KEYS.index(name)] for name in names])
            for names in (calls[step // 2 % 2], calls[step // 2 % 2][2:]):
                store.pull(names, [out[KEYS.index(name)] for name in names])
            assert same(out, total(step))

    run_job(train, transport=transport, servers=2)


@both
def test_what_is_read_stays_until_the_keys_next_push(run_job, transport):
    def train(store, _):
        store.init(KEYS, like(0.0))
        for step in range(8):
            pushed = gradients(store.rank, step)
            values = store.pushpull(KEYS, pushed, READ).values
            store.barrier()
            again = store.pull(KEYS[::-1], READ).values[::-1]
            store.pushpull(["k0", "k4"], [pushed[0], pushed[4]])
            store.barrier()
            for found in (values, again):
                others = [
                    (one, wanted) for n, (one, wanted) in enumerate(zip(found, total(step), strict=True)) if n % 4
                ]
                assert all(np.array_equal(*pair) for pair in others)

    job = run_job(train, transport=transport)
    for slice_ in job.servers[0]._service._core.slices().values():
        assert len(slice_.spare["value"]) < 6, "the memory does not grow"


@both
def test_pushes_need_not_wait_for_values(run_job, transport):
    """Also from arrays that are not shared, while servers still read an earlier push."""

    def train(store, _):
        store.init(KEYS, like(0.0))
        made = [gradients(store.rank, step) for step in range(12)]
        for step in range(0, 12, 3):
            for each in range(step, step + 3):
                store.push(KEYS, made[each], priority=5)
            out = like()
            store.pull(KEYS, out)
            assert same(out, total(step + 2))

    run_job(train, transport=transport)


@both
def test_steps_on_the_server_and_their_states(run_job, transport):
    def train(store, job):
        store.init(KEYS, like(0.0))
        store.set_optimizer({"name": "plain"})
        expected = like(0.0)
        for step in range(9):
            handle = store.pushpull(KEYS, gradients(store.rank, step), READ, rate=0.5)
            for before, summed in zip(expected, total(step), strict=True):
                before -= 0.5 * summed
            assert same(handle.values, expected)
            store.barrier()
            if step == 5:
                states, then = store.optimizer_states(), [each.copy() for each in expected]
            store.barrier()
        assert [each.completed for each in in_lockstep(job)] == [9]
        store.barrier()
        store.load_optimizer_state_bytes(states)
        out = like()
        store.pull(KEYS, out)
        assert same(out, then)

    job = run_job(train, transport=transport)
    with job.servers[0]._service.exclusive() as core:
        assert optimizer_state.pack(core.slices())


@pytest.mark.parametrize(
    "options",
    [
        {"workers": 3, "each": {2: {"transport": "tcp"}}},
        *({"wire": level, "transport": "tcp", "certificate_file": "certificate"} for level in ("auth", "tls")),
    ],
    ids=["one of three workers uses no shared memory", "auth", "tls"],
)
def test_other_links(run_job, options, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "certificate").write_bytes(new()[0])

    def train(store, _):
        store.init(KEYS, like(0.0))
        for step in range(5):
            out = like()
            store.pushpull(KEYS, gradients(store.rank, step), out)
            assert same(out, total(step, options.get("workers", 2)))

    assert len(in_lockstep(run_job(train, **options))) == 1
