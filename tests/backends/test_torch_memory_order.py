"""Another memory order of weights: what an optimizer has of them follows it, or it is refused. Fused kernels, servers
and buckets read weights, gradients and states as flat memory."""

import pytest
import torch
from torch import nn

from dmltrain import kvstore, optimizers
from dmltrain.backends.torch import layers, state
from dmltrain.backends.torch.distributed import distribute
from dmltrain.backends.torch.optimizer import lay_out_state, make_optimizer
from dmltrain.options import parse
from tests.backends.trainers import SMALL

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
        for number, each in enumerate(model.parameters()):
            each.copy_(gradient(each, number))
    return model.to(memory_format=memory_format)


def gradient(like, seed):
    draw = torch.Generator().manual_seed(seed)
    return torch.empty_like(like, requires_grad=False).copy_(torch.randn(like.shape, generator=draw))


def train(model, optimizer, steps):
    for step in steps:
        for number, each in enumerate(model.parameters()):
            each.grad = gradient(each, 10 * step + number)
        optimizer.step()


@pytest.mark.parametrize("saved, resumed", [FORMATS, FORMATS[::-1]], ids=str)
@pytest.mark.parametrize("name", optimizers.NAMES)
def test_every_optimizer_goes_on_in_another_memory_format(name, saved, resumed):
    def made(memory_format):
        module = layers.build(SMALL)
        layers.initialise(module, SMALL, 3)
        module = module.to(memory_format=memory_format)
        kind = "dist_async" if optimizers.BY_NAME[name].asynchronous else "local"
        inner = make_optimizer(module, SMALL, parse(f"--optimizer {name} --kv-store {kind} --lr 0.01".split()))
        return module, distribute(module, inner, kvstore.create("local"))

    (first, before), (second, after) = made(saved), made(resumed)
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
    own = distribute(model, torch.optim.Adam(model.parameters(), amsgrad=True, fused=True), kvstore.create("local"))
    whole = torch.optim.Adam(plain.parameters(), amsgrad=True, foreach=False)
    train(model, own, range(STEPS))
    train(plain, whole, range(2 * STEPS))
    found = own.state_dict()
    for number, arrays in found["state"].items():
        found["state"][number] = {
            name: ORDERS[order](each) if each.dim() == 4 else each for name, each in arrays.items()
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
