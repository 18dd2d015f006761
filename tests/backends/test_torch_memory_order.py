"""Another memory order of weights: what an optimizer has of them follows it, or it is refused. Fused kernels, servers
and buckets read weights, gradients and states as flat memory."""

import numpy as np
import pytest
import torch
from torch import nn

from dmltrain import kvstore, optimizers
from dmltrain.backends.torch import layers, state
from dmltrain.backends.torch.optimizer import lay_out_state, make_optimizer
from dmltrain.base.errors import UserError
from dmltrain.kvstore.local_steps import LocalSteps
from dmltrain.options import parse
from tests.backends.changing_store import ChangingStore
from tests.backends.late_store import LateStore
from tests.backends.served_store import ServedStore
from tests.backends.stepping_alone import NESTEROV
from tests.backends.trainers import SMALL
from tests.connected import connected

FORMATS = (torch.contiguous_format, torch.channels_last)
STEPS = 3


def transposed(array):
    """Equal, with its first two dimensions exchanged in memory."""
    return array.transpose(0, 1).clone(memory_format=torch.contiguous_format).transpose(0, 1)


def with_gaps(array):
    return torch.stack([array, array + 1], dim=-1)[..., 0]


ORDERS = {
    "contiguous": lambda array: array.clone(memory_format=torch.contiguous_format),
    "channels last": lambda array: array.clone(memory_format=torch.channels_last),
    "transposed": transposed,
    "with gaps": with_gaps,
}


def stored(content):
    """After a way through a file."""
    return state.decode(state.encode(content))


# -- states that are loaded -------------------------------------------------------------------------------------------


def convolution(memory_format):
    """Without rounding that depends on the memory format: tests set its gradients."""
    model = nn.Conv2d(3, 4, 3)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(gradient(parameter, number))
    return model.to(memory_format=memory_format)


def gradient(like, seed):
    draw = torch.Generator().manual_seed(seed)
    return torch.empty_like(like, requires_grad=False).copy_(torch.randn(like.shape, generator=draw))


def train(model, optimizer, steps):
    for step in steps:
        for number, parameter in enumerate(model.parameters()):
            parameter.grad = gradient(parameter, 10 * step + number)
        optimizer.step()


@pytest.mark.parametrize("name", optimizers.NAMES)
def test_every_optimizer_goes_on_in_another_memory_format(name):
    def made(memory_format):
        module = layers.build(SMALL)
        layers.initialise(module, SMALL, 3)
        module = module.to(memory_format=memory_format)
        kind = "dist_async" if optimizers.BY_NAME[name].asynchronous else "local"
        inner = make_optimizer(module, SMALL, parse(f"--optimizer {name} --kv-store {kind} --lr 0.01".split()))
        return module, connected(module, inner, kvstore.create("local"))

    (first, before), (second, after) = map(made, FORMATS)
    train(first, before, range(STEPS))
    second.load_state_dict(stored(first.state_dict()))
    after.load_state_dict(stored(before.state_dict()))
    for model, optimizer in ((first, before), (second, after)):
        train(model, optimizer, range(STEPS, 2 * STEPS))
    assert first.conv0_weight.stride() != second.conv0_weight.stride()
    torch.testing.assert_close(second.state_dict(), first.state_dict(), rtol=1e-5, atol=1e-6, check_stride=False)
    for one, other in zip(before.state.values(), after.state.values(), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6, check_stride=False)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("memory_format", FORMATS, ids=str)
def test_arrays_of_a_file_may_lie_in_any_order(order, memory_format):
    model, plain = (convolution(memory_format) for _ in range(2))
    own = connected(model, torch.optim.Adam(model.parameters(), amsgrad=True, fused=True), kvstore.create("local"))
    whole = torch.optim.Adam(plain.parameters(), amsgrad=True, foreach=False)
    train(model, own, range(STEPS))
    train(plain, whole, range(2 * STEPS))
    found = own.state_dict()
    for number, arrays in found["state"].items():
        found["state"][number] = {
            name: ORDERS[order](array) if array.dim() == 4 else array for name, array in arrays.items()
        }
    own.load_state_dict(stored(found) if order != "with gaps" else found)
    for parameter in model.parameters():
        assert {each.stride() for each in own.state[parameter].values() if each.dim()} == {parameter.stride()}
    train(model, own, range(STEPS, 2 * STEPS))
    torch.testing.assert_close(model.state_dict(), plain.state_dict())


def test_a_state_stays_on_its_device_and_of_its_type():
    """torch keeps the count of steps on the CPU, also where a parameter of one number is on a GPU."""
    parameter = nn.Parameter(torch.zeros((), device="meta"))
    optimizer = torch.optim.Adam([parameter])
    optimizer.state[parameter] = {"step": torch.tensor(7.0), "exp_avg": torch.zeros((), dtype=torch.float64)}
    lay_out_state(optimizer)
    found = optimizer.state[parameter]
    assert found["step"] == 7.0 and found["step"].device.type == "cpu" and found["exp_avg"].dtype == torch.float64


# -- every way to distribute ------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Its gradient is the image that it is called with."""

    def __init__(self, memory_format=torch.contiguous_format, order="contiguous"):
        super().__init__()
        values = (torch.arange(24.0) / 10).reshape(2, 3, 2, 2).contiguous(memory_format=memory_format)
        self.weight = nn.Parameter(ORDERS[order](values) if order != "contiguous" else values)

    def forward(self, image):
        return (self.weight * image).sum()


def adam(model, **options):
    return torch.optim.Adam(model.parameters(), lr=0.1, **options)


def learn(model, optimizer, steps):
    for step in steps:
        optimizer.round(2, np.array([1.0, 0.0, 0.0]))  # counts in elastic jobs only
        optimizer.zero_grad()
        model(gradient(model.weight, step)).backward()
        optimizer.step()


def resumed(make, steps=2 * STEPS):
    """Weights after half of the steps in one memory format, and half in the other."""
    model, optimizer = make(FORMATS[0])
    learn(model, optimizer, range(steps // 2))
    files = stored({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    model, optimizer = make(FORMATS[1])
    optimizer.load_state_dict(files["optimizer"])
    with torch.no_grad():
        model.weight.copy_(files["model"]["weight"])
    learn(model, optimizer, range(steps // 2, steps))
    optimizer.synchronize()
    assert model.weight.is_contiguous(memory_format=torch.channels_last)
    return model.weight.detach()


def in_one_process(factor=1.0):
    """Weights after two times STEPS with these gradients times `factor`."""
    model = Net()
    optimizer = adam(model, foreach=False)
    for step in range(2 * STEPS):
        model.weight.grad = factor * gradient(model.weight, step)
        optimizer.step()
    return model.weight.detach()


WAYS = {
    "one worker": (lambda: kvstore.create("local"), {}),
    "early": (LateStore, {"step_early": True}),
    "deferred": (LateStore, {"defer": True}),
    "elastic": (lambda: ChangingStore(members=2), {}),
}


@pytest.mark.parametrize("way", WAYS)
def test_load_state_dict_lays_out_the_state(way):
    make_store, options = WAYS[way]

    def make(memory_format):
        model = Net(memory_format)
        return model, connected(model, adam(model, fused=True), make_store(), **options)

    torch.testing.assert_close(resumed(make), in_one_process(), check_stride=False)


def test_load_state_dict_lays_out_the_state_where_workers_wait_for_the_mean(job):
    def one(store):
        def make(memory_format):
            model = Net(memory_format)
            return model, connected(model, adam(model, fused=True), store)

        return resumed(make)

    for found in job.all(one):
        torch.testing.assert_close(found, in_one_process(), check_stride=False)


def test_load_state_dict_lays_out_both_states_between_two_averages(alone):
    """The inner optimizer's, and the outer one's momentum and weights at the last average."""

    def one(store):
        def make(memory_format):
            model = Net(memory_format)
            return model, connected(model, adam(model, fused=True), store, averaging=LocalSteps(2, *NESTEROV))

        model, whole = make(FORMATS[0])
        learn(model, whole, range(2 * STEPS))
        whole.synchronize()
        return resumed(make), model.weight.detach()

    for found, expected in alone.all(one):
        torch.testing.assert_close(found, expected, check_stride=False)


@pytest.mark.parametrize("way", WAYS)
def test_an_optimizer_that_has_made_steps_keeps_its_state_in_order(way):
    """A weight whose transposed memory is dense stays as it is."""
    make_store, options = WAYS[way]
    model = Net(order="transposed")
    inner, strides = adam(model, fused=True), model.weight.stride()
    for step in range(STEPS):
        model.weight.grad = gradient(model.weight, step)
        inner.step()
    optimizer = connected(model, inner, make_store(), **options)
    learn(model, optimizer, range(STEPS, 2 * STEPS))
    optimizer.synchronize()
    assert model.weight.stride() == strides
    torch.testing.assert_close(model.weight.detach(), in_one_process(), check_stride=False)


# -- flat memory that cannot follow -----------------------------------------------------------------------------------


ON_SERVERS = {
    "at step": ("dist_sync", {"update_on_kvstore": True}),
    "early": ("dist_sync", {"update_on_kvstore": True, "step_early": True}),
    "asynchronous": ("dist_async", {}),
}


@pytest.mark.parametrize("way", ON_SERVERS)
def test_a_state_of_servers_in_another_order_is_refused(way):
    kind, options = ON_SERVERS[way]

    def make(memory_format):
        model = Net(memory_format)
        return model, connected(model, adam(model), ServedStore(kind), **options)

    model, optimizer = make(FORMATS[0])
    learn(model, optimizer, range(STEPS))
    found = stored(optimizer.state_dict())
    _, other = make(FORMATS[1])
    with pytest.raises(
        UserError, match=r"parameter weight .* \[0, 1, 2, 3\] in memory, and the model here \[0, 2, 3, 1"
    ):
        other.load_state_dict(found)


@pytest.mark.parametrize("says", [True, False])
def test_a_state_of_servers_in_the_same_order_is_loaded(says):
    """Also an earlier version's, which does not say its order."""

    def make(weight):
        model = Net(FORMATS[1])
        with torch.no_grad():
            model.weight.copy_(weight)
        return model, connected(model, adam(model), ServedStore(), update_on_kvstore=True)

    model, optimizer = make(Net().weight)
    learn(model, optimizer, range(STEPS))
    found = stored(optimizer.state_dict())
    if not says:
        del found["orders"]
    model, optimizer = make(model.weight)
    optimizer.load_state_dict(found)
    learn(model, optimizer, range(STEPS, 2 * STEPS))
    expected = in_one_process(1.5)  # the mean of both workers: the second one's gradient is twice the first's
    torch.testing.assert_close(model.weight.detach(), expected, check_stride=False)


@pytest.mark.parametrize("options", [{}, {"step_early": True}, {"update_on_kvstore": True}], ids=str)
def test_workers_whose_weights_lie_in_different_orders_are_refused(job, options):
    def one(store):
        model = Net(FORMATS[store.rank])
        with pytest.raises(UserError, match=r"first difference is 0 .*the same memory format") as caught:
            connected(model, torch.optim.SGD(model.parameters(), lr=1.0), store, **options)
        return str(caught.value)

    first, second = job.all(one)
    assert "with dimensions" not in first
    assert "parameter weight, float32 (2, 3, 2, 2) with dimensions [0, 2, 3, 1] from the outermost in memory" in second


def test_strides_of_single_elements_do_not_count(job):
    """A weight with one input channel lies in memory in the same way with both formats."""

    def one(store):
        model = nn.Conv2d(1, 4, 3, bias=False)
        with torch.no_grad():
            model.weight.copy_(gradient(model.weight, 0))
        before = model.weight.detach().clone()
        model.weight.data = model.weight.data.as_strided((4, 1, 3, 3), [(9, 9, 3, 1), (9, 1, 3, 1)][store.rank])
        optimizer = connected(model, torch.optim.SGD(model.parameters(), lr=1.0, fused=True), store)
        (model.weight * gradient(model.weight, 1)).sum().backward()
        optimizer.step()
        return before - model.weight.detach()

    for found in job.all(one):
        torch.testing.assert_close(found, gradient(torch.empty(4, 1, 3, 3), 1), check_stride=False)
