"""Many small keys in one call: whole stores, through shared memory and over TCP."""

import numpy as np
import pytest

from dmltrain.kvstore.base import READ
from dmltrain.kvstore.server import optimizer_state
from launch.certificate import new
from tests.kvstore.whole_job import WholeJob

SIZES = (5, 0, 20_000, 1, 7, 70_000, 12)
KEYS = [f"k{number}" for number in range(len(SIZES))]


@pytest.fixture
def start_job():
    jobs = []

    def start(**options):
        jobs.append(WholeJob(**({"workers": 2, "servers": 1} | options)))
        return jobs[-1]

    yield start
    for each in jobs:
        each.close()


both = pytest.mark.parametrize("transport", ["shm", "tcp"])


def gradients(rank, step, dtype=np.float32):
    made = [np.random.default_rng([rank, step, number]).standard_normal(size) for number, size in enumerate(SIZES)]
    return [each.astype(np.float64 if number % 3 == 1 else dtype) for number, each in enumerate(made)]


def total(step, workers=2):
    parts = [gradients(rank, step) for rank in range(workers)]
    return [sum(each[1:], each[0]) for each in zip(*parts, strict=True)]


def in_lockstep(job):
    return [each for server in job.servers for each in server._service._core.groups.in_lockstep()]


def initial(store, **options):
    store.init(KEYS, [np.zeros_like(each) for each in gradients(0, 0)], **options)


@both
@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("how", ["own", "buffers", "read"])
def test_the_values_of_every_step_are_right(start_job, transport, mean, how):
    job = start_job(transport=transport)

    def train(store):
        initial(store, mean=mean)
        buffers = store.buffers(KEYS)
        for step in range(6):
            pushed, wanted = gradients(store.rank, step), total(step)
            if how != "own":
                for buffer, gradient in zip(buffers, pushed, strict=True):
                    buffer[:] = gradient
                pushed = buffers
            out = READ if how == "read" else [np.full_like(each, 9) for each in pushed]
            handle = store.pushpull(KEYS, pushed, out, priority=step % 2)
            found = handle.values if how == "read" else out
            for value, expected in zip(found, wanted, strict=True):
                assert np.array_equal(value, expected * value.dtype.type(0.5) if mean else expected)
                assert value.dtype == expected.dtype and not (how == "read" and value.flags.writeable)
        assert store.bytes_received > 5 * sum(each.nbytes for each in pushed)
        assert store.bytes_sent > 5 * sum(each.nbytes for each in pushed)
        assert store.take_staleness() == 0.0

    job.all(train)
    assert [len(each.members) for each in in_lockstep(job)] == [6], "all but the largest"


@both
def test_a_call_may_be_grouped_or_not_and_pushed_apart_from_its_pull(start_job, transport):
    """The workers do not agree on how, and change it."""
    job = start_job(transport=transport, servers=2)

    def train(store):
        initial(store)
        calls = [KEYS, KEYS[::-1], KEYS[:3], ["k0"]]
        for step in range(12):
            pushed, wanted, out = gradients(store.rank, step), total(step), [np.ones_like(x) for x in total(0)]
            first = calls[(step // 3 + store.rank) % len(calls)] if step > 2 else KEYS
            for names in (first, [each for each in KEYS if each not in first]):
                store.push(names, [pushed[KEYS.index(name)] for name in names])
            for names in (calls[step // 2 % 2], calls[step // 2 % 2][2:]):
                store.pull(names, [out[KEYS.index(name)] for name in names])
            for value, expected in zip(out, wanted, strict=True):
                assert np.array_equal(value, expected)

    job.all(train)


@both
def test_what_is_read_stays_until_the_keys_next_push(start_job, transport):
    job = start_job(transport=transport)

    def train(store):
        initial(store)
        for step in range(8):
            values = store.pushpull(KEYS, gradients(store.rank, step), READ).values
            store.barrier()
            again = store.pull(KEYS[::-1], READ).values[::-1]
            store.pushpull(["k0", "k4"], [gradients(store.rank, step)[number] for number in (0, 4)])
            store.barrier()
            for number, (value, other, expected) in enumerate(zip(values, again, total(step), strict=True)):
                if number not in (0, 4):
                    assert np.array_equal(value, expected) and np.array_equal(other, expected)

    job.all(train)
    for slice_ in job.servers[0]._service._core.slices().values():
        assert len(slice_.spare["value"]) < 6, "the memory does not grow"


@both
def test_pushes_need_not_wait_for_values(start_job, transport):
    """Also from arrays that are not shared, while servers still read an earlier push."""
    job = start_job(transport=transport)

    def train(store):
        initial(store)
        made = [gradients(store.rank, step) for step in range(12)]
        for step in range(0, 12, 3):
            for each in range(step, step + 3):
                store.push(KEYS, made[each], priority=5)
            out = [np.ones_like(each) for each in made[0]]
            store.pull(KEYS, out)
            for value, expected in zip(out, total(step + 2), strict=True):
                assert np.array_equal(value, expected)

    job.all(train)


@both
def test_steps_on_the_server_and_their_states(start_job, transport):
    job = start_job(transport=transport)

    def train(store):
        initial(store)
        store.set_optimizer({"name": "plain"})
        expected = [np.zeros_like(each) for each in total(0)]
        states = []
        for step in range(9):
            handle = store.pushpull(KEYS, gradients(store.rank, step), READ, rate=0.5)
            for value, before, summed in zip(handle.values, expected, total(step), strict=True):
                before -= 0.5 * summed
                assert np.array_equal(value, before)
            store.barrier()
            if step == 5:
                states = store.optimizer_states()
            store.barrier()
        assert [each.completed for each in in_lockstep(job)] == [9]
        store.barrier()
        store.load_optimizer_state_bytes(states)
        out = [np.zeros_like(each) for each in expected]
        store.pull(KEYS, out)
        again = [np.zeros_like(each) for each in expected]
        for step in range(6):
            for value, summed in zip(again, total(step), strict=True):
                value -= 0.5 * summed
        for value, expected in zip(out, again, strict=True):
            assert np.array_equal(value, expected)

    job.all(train)
    with job.servers[0]._service.exclusive() as core:
        assert optimizer_state.pack(core.slices())


def test_three_workers_one_of_which_uses_no_shared_memory(start_job):
    job = start_job(workers=3, each={2: {"transport": "tcp"}})

    def train(store):
        initial(store)
        for step in range(5):
            out = [np.ones_like(each) for each in total(0)]
            store.pushpull(KEYS, gradients(store.rank, step), out)
            for value, expected in zip(out, total(step, 3), strict=True):
                assert np.array_equal(value, expected)

    job.all(train)
    assert len(in_lockstep(job)) == 1


@pytest.mark.parametrize("wire", ["auth", "tls"])
def test_protected_links(start_job, wire, tmp_path):
    (tmp_path / "certificate").write_bytes(new()[0])
    job = start_job(wire=wire, transport="tcp", certificate_file=str(tmp_path / "certificate"))

    def train(store):
        initial(store)
        for step in range(4):
            out = [np.ones_like(each) for each in total(0)]
            store.pushpull(KEYS, gradients(store.rank, step), out)
            for value, expected in zip(out, total(step), strict=True):
                assert np.array_equal(value, expected)

    job.all(train)
    assert len(in_lockstep(job)) == 1
