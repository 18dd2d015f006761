"""A server's slices: where their memory comes from, what steps may write, default times, limits of states."""

import io

import numpy as np
import pytest

from dmltrain.kvstore import codec
from dmltrain.kvstore.server import optimizer_state
from dmltrain.kvstore.server.core import ServerCore
from dmltrain.kvstore.server.declared import Rejected
from dmltrain.kvstore.transport.message import Declare, Key
from tests.kvstore.carrying_out import push, run
from tests.kvstore.through_a_codec import encode

FP16 = {"type": "fp16"}


class Memory:
    """Gives arrays one behind another, and notes their sizes."""

    def __init__(self):
        self.sizes = []

    def __call__(self, size):
        self.sizes.append(size)
        return sum(self.sizes[:-1]), np.empty(size, np.uint8)


def core_of(workers=2, kind="dist_sync", staleness=0.0, slices=(5,), compression=None, **options):
    core = ServerCore(workers, **options)
    pairs = tuple(enumerate(slices))
    key = Key(0, "w", "float32", True, compression or {"type": "none"}, pairs)
    for worker in range(workers):
        core.declare(worker, Declare(kind, staleness, (key,)))
    if core.make_step:
        core.optimize({"name": "made"})
    return core


def buffer_of(core, worker, values):
    """A push that has arrived."""
    buffer = core.buffer(worker, 0, 0, 20, 0)
    buffer.array[:] = values
    return buffer


def lent(core, worker, clock, values, rate=-1.0):
    """A push in shared memory, and what to do now."""
    return core.push(worker, 0, 0, clock, rate, core.lend(worker, 0, 0, values.view(np.uint8), 0))


# -- memory -----------------------------------------------------------------------------------------------------------


def test_the_slices_of_a_key_are_contiguous_and_so_are_their_second_buffers():
    memory = Memory()
    core_of(slices=(5, 7, 9), allocate=memory)
    assert memory.sizes == [20, 28, 36, 20, 28, 36]


def test_the_lowest_of_several_free_buffers_is_taken():
    core = core_of(allocate=Memory())
    taken = [core.buffer(0, 0, 0, 20, 0) for _ in range(4)]
    offsets = [each.offset for each in taken]
    assert offsets == sorted(offsets)
    for each in (2, 0, 3, 1):
        core.give_back(taken[each])
    assert [core.buffer(0, 0, 0, 20, 0).offset for _ in range(4)] == offsets


def test_only_buffers_that_are_sent_are_in_shared_memory():
    """Encoded pushes are received, encoded values are sent."""
    memory, kind = Memory(), codec.make(FP16)
    core = core_of(allocate=memory, compression=FP16)
    before = len(memory.sizes)
    buffer = core.buffer(0, 0, 0, 10, kind.number)
    assert buffer.offset is None and len(memory.sizes) == before
    for worker in range(2):
        push(core, worker, 0, 1, (encode(kind, np.ones(5, np.float32), None), kind.number))
    (reply,) = core.pull(0, 0, 0, 1)
    assert memory.sizes[before:] == [10] and reply.buffer.offset == sum(memory.sizes[:-1])


def test_the_memory_of_a_repeated_push_is_freed():
    core = core_of()
    push(core, 0, 0, 1, [1] * 5)
    places = set()
    for _ in range(5):
        repeated = core.buffer(0, 0, 0, 20, 0)
        places.add(repeated.array.ctypes.data)
        assert core.push(0, 0, 0, 1, -1.0, repeated) == []
    assert len(places) == 1


def test_a_sum_does_not_overwrite_an_addend():
    """The first two of three gradients lie in shared memory, the third in the server's own."""
    core = core_of(3)
    values = [np.full(5, 10.0**worker, np.float32) for worker in range(3)]
    actions = core.push(2, 0, 0, 1, -1.0, buffer_of(core, 2, values[2]))
    for worker in range(2):
        actions += lent(core, worker, 1, values[worker])
    run(core, actions)
    (reply,) = core.pull(0, 0, 0, 1)
    assert reply.buffer.array.tolist() == [111.0] * 5 and values[0].tolist() == [1.0] * 5


def test_a_step_that_changes_its_gradient_does_not_change_shared_memory_but_the_servers_own():
    """No copy is made of that."""
    seen = []

    def step(value, gradient, rate):
        seen.append(gradient)
        gradient *= rate
        value -= gradient

    core = core_of(1, "dist_async", float("inf"), make_step=lambda spec, key, value: step)
    values = np.ones(5, np.float32)
    values.flags.writeable = False  # as another process's memory
    run(core, lent(core, 0, 1, values, 0.5))
    (reply,) = core.pull(0, 0, 0, 1)
    assert reply.buffer.array.tolist() == [-0.5] * 5
    buffer = buffer_of(core, 0, 1.0)
    run(core, core.push(0, 0, 0, 2, 1.0, buffer))
    assert len(seen) == 2 and seen[1] is buffer.array


def test_an_empty_slice_completes_rounds():
    core = core_of(3, slices=(0,))
    replies = []
    for worker in range(3):
        replies += push(core, worker, 0, 1, []) + core.pull(worker, 0, 0, 1)
    assert [reply.buffer.array.size for reply in replies] == [0] * 3


# -- times and limits -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["sum", "step", "leaves"])
def test_without_times_a_value_reports_none(how):
    step = {"make_step": lambda spec, key, value: lambda value, gradient, rate: None} if how != "sum" else {}
    core = core_of(2, "dist_sync" if how == "sum" else "dist_ssp", **step)
    assert core.pull(0, 0, 0, 1) == push(core, 0, 0, 1, [1] * 5) == []
    (reply,) = core.finish(1) if how == "leaves" else push(core, 1, 0, 1, [1] * 5)
    assert (reply.waited, reply.worked, reply.priority) == (0.0, 0.0, 0)
    assert how != "sum" or reply.staleness == 0.0


def test_a_push_of_another_type_is_named():
    core, number = core_of(1, compression=FP16), codec.make(FP16).number
    for size, dtype, name in ((20, 0, "float32"), (10, 1, "float64"), (10, 2, "compression 2")):
        said = f"worker 0 sent {size} bytes of {name} for key 0 slice 0, expected 10 bytes of comp.* {number}"
        with pytest.raises(Rejected, match=said):
            core.buffer(0, 0, 0, size, dtype)


# -- states -----------------------------------------------------------------------------------------------------------


class Full:
    """The step with the largest state that there is."""

    def __init__(self, spec, key, value):
        self.arrays = {f"{name}_of_the_gradients": value.copy() for name in ("mean", "square", "maximum", "momentum")}

    def __call__(self, value, gradient, rate):
        pass

    def state(self):
        return self.arrays


@pytest.mark.parametrize("slices", [(1,) * 200, (1000,)])
def test_every_packed_state_is_within_the_accepted_size(slices):
    core = core_of(1, make_step=Full, slices=slices)
    size = len(optimizer_state.pack(core.slices()))
    assert size <= optimizer_state.limit(core.slices()) < 4 * size


def state_of(**fields):
    """A state of the one slice of key 0."""
    stream = io.BytesIO()
    np.savez(stream, **{f"0/0/{name}": array for name, array in fields.items()})
    return stream.getvalue()


@pytest.mark.parametrize(
    "fields",
    [
        {"mean": np.ones(5, np.float32)},
        {"value": np.ones(4, np.float32)},
        {"value": np.ones(5, np.float32), "mean": np.ones(4, np.float32)},
        {"value": np.ones((5, 1), np.float32)},
    ],
    ids=["no value", "another value", "another array", "another shape"],
)
def test_a_state_of_other_arrays_is_refused(fields):
    core = core_of(1)
    with pytest.raises(Rejected, match="the optimizer state of key 0 slice 0 belongs to another model"):
        optimizer_state.unpack(state_of(**fields), core.slices())


def test_a_state_may_have_scalars_and_no_residual():
    core = core_of(1, compression={"type": "2bit", "threshold": 1.0})
    core.slices()[0, 0].residual[:] = 7
    optimizer_state.unpack(state_of(value=np.full(5, 3, np.float32), step=np.float32(2)), core.slices())
    assert core.slices()[0, 0].value.array.tolist() == [3.0] * 5
    assert core.slices()[0, 0].residual.tolist() == [7.0] * 5
    optimizer_state.unpack(state_of(value=np.ones(5, np.float32), residual=np.ones(5, np.float32)), core.slices())
    assert core.slices()[0, 0].residual.tolist() == [1.0] * 5
