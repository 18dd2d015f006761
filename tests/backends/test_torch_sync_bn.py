"""Batch norms with the statistics of all devices and workers; jobs with them are in tests/test_fit.py."""

from functools import partial

import pytest
import torch
from torch.nn import functional

from dmltrain.backends.torch import sync_bn
from tests.backends.trainers import SMALL, batch, torch_trainer

EXACT, HALF = {"rtol": 1e-5, "atol": 1e-5}, {"rtol": 0.02, "atol": 0.02}
CASES = [
    (torch.float32, (6, 3, 5, 4), True, EXACT),
    (torch.float32, (6, 3), False, EXACT),
    (torch.bfloat16, (6, 3, 5, 4), True, HALF),
    (torch.float16, (6, 3, 5, 4), False, HALF),
]


def computed(function, x, gamma, beta, dy):
    """The result, the gradients of x, gamma and beta, and the moving statistics afterwards."""
    x, beta = x.clone().requires_grad_(), beta.clone().requires_grad_()
    gamma = None if gamma is None else gamma.clone().requires_grad_()
    moving = torch.zeros(3), torch.ones(3)
    y = function(x, *moving, gamma, beta, True, 0.25, 1e-3)
    y.backward(dy)
    return [y.detach(), x.grad, *([] if gamma is None else [gamma.grad]), beta.grad, *moving]


@pytest.mark.parametrize(("dtype", "shape", "has_gamma", "close"), CASES)
def test_each_replica_has_its_part_of_torchs_batch_norm_of_all_samples(dtype, shape, has_gamma, close):
    """Two replicas with 4 and 2 samples, and one without; a mean far from 0."""
    draw = torch.Generator().manual_seed(1)
    x, dy = (torch.randn(shape, generator=draw).add(shift).to(dtype) for shift in (3.0, 0.0))
    gamma, beta = (torch.rand(3, generator=draw) if wanted else None for wanted in (has_gamma, True))
    expected = computed(functional.batch_norm, x, gamma, beta, dy)
    found, turns = [None] * 3, sync_bn.Turns(None)

    def run(index, own, gradient):
        function = partial(sync_bn.batch_norm, add_up=partial(turns.add_up, index))
        found[index] = computed(function, own, gamma, beta, gradient)

    parts = zip(x.split([4, 2, 0]), dy.split([4, 2, 0]), strict=True)
    turns.run([partial(run, index, *part) for index, part in enumerate(parts)])
    for place, value in enumerate(expected):
        own = [each[place] for each in found]
        if place < 2:  # y and the gradient of x
            torch.testing.assert_close(torch.cat(own), value, **close)
        elif place < len(expected) - 2:
            torch.testing.assert_close(sum(own), value, **close)
        else:
            assert torch.equal(own[0], own[1]) and torch.equal(own[0], own[2])
            torch.testing.assert_close(own[0], value, **EXACT)


@pytest.mark.parametrize(
    "line, tolerance", [("", 1e-5), ("--dtype bfloat16", 0.02), ("--memory-format contiguous", 1e-5)]
)
def test_several_devices_make_the_steps_of_one(line, tolerance):
    """Also in steps of two batches, and where devices are without samples."""
    one, several = (torch_trainer(SMALL, f"--wd 0.01 {more} {line}") for more in ("", "--sync-bn 1 --devices cpu:3"))
    for step, size in enumerate([16, 15, 2, 7]):
        for each in (one, several):
            each.accumulate(*batch(SMALL, seed=9), 16 + size)
            each.train_step(*batch(SMALL, size, step), 16 + size, 0.05)
    for name, value in one.state()["model"].items():
        torch.testing.assert_close(several.state()["model"][name], value, rtol=tolerance, atol=tolerance)
    first, *others = (list(module.buffers()) for module in several.replicas.modules)
    assert first and all(torch.equal(own, theirs) for other in others for own, theirs in zip(first, other, strict=True))
    several.evaluate(*batch(SMALL))  # each device with the moving statistics


def test_an_error_of_one_device_ends_the_step():
    turns, done = sync_bn.Turns(None), []

    def train(index):
        for number in range(3):
            if (index, number) == (1, 2):
                raise ValueError("no memory")
            turns.add_up(index, torch.ones(1))
        done.append(index)

    with pytest.raises(ValueError, match="no memory"):
        turns.run([partial(train, index) for index in range(3)])
    assert not done
    turns.run([lambda: done.append(0)])
    assert done == [0]
