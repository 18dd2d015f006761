"""Optimizers on real servers: one server and three make the steps that the workers would make, slice or not."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
from dmltrain import optimizers  # noqa: E402
from dmltrain.backends.torch import layers as torch_layers  # noqa: E402
from dmltrain.backends.torch.distributed import distribute  # noqa: E402
from dmltrain.backends.torch.optimizer import make_optimizer, set_rate  # noqa: E402
from dmltrain.backends.torch.server_optimizer import Step  # noqa: E402
from dmltrain.layers import Dense, Flatten, Network, Rule, chain  # noqa: E402
from dmltrain.options import parse  # noqa: E402
from tests.kvstore.whole_job import WholeJob  # noqa: E402

NETWORK = Network(  # the first weight has 600 KB, more than two slices
    "mlp",
    chain(Flatten(), Dense("large", 300, weight_rule=Rule(lr_mult=0.5)), Dense("fc", 3, bias_rule=Rule(wd_mult=2.0))),
    (2, 16, 16),
    3,
)
RATES = (0.02, 0.02, 0.005)
LARGE_BATCH = ("lamb", "lars", "lbsgd", "sgld")  # their keys are whole
NAMES = [name for name in optimizers.NAMES if name != "dcasgd"]  # see test_dcasgd.py


@pytest.fixture(scope="module", params=[1, 3], ids="{} servers".format)
def job(request) -> Iterator[WholeJob]:
    made = WholeJob(workers=2, servers=request.param, make_step=Step)
    made.all(lambda store: store.init("first", np.zeros(1, np.float32)))
    yield made
    made.all(lambda store: store.close())
    assert made.ended() == ["", ""] + [""] * (request.param - 1)
    made.close()


def settings(name):
    return parse(f"--optimizer {name} --lr {RATES[0]} --wd 0.05 --kv-store dist_sync".split())


def made(name):
    module = torch_layers.build(NETWORK)
    torch_layers.initialise(module, NETWORK, 3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.05)
    return module, make_optimizer(module, NETWORK, settings(name))


def gradients(module, rank, step):
    draw = torch.Generator().manual_seed(100 * rank + step)
    return [torch.randn(each.shape, generator=draw) for each in module.parameters()]


def on_servers(store, name):
    """The weights of one worker after these steps, and how many keys are divided."""
    module, inner = made(name)
    optimizer = distribute(module, inner, store, average=False, overlap=False, update_on_kvstore=True)
    for step, rate in enumerate(RATES):
        set_rate(optimizer, rate)
        for parameter, gradient in zip(module.parameters(), gradients(module, store.rank, step), strict=True):
            parameter.grad = gradient
        optimizer.step()
        optimizer.settle()
    divided = [len(store._entries.find(key).slices) > 1 for key in [bucket.name for bucket in optimizer._buckets]]
    return [each.detach().numpy().copy() for each in module.parameters()], sum(divided)


def on_a_worker(name):
    module, optimizer = made(name)
    for step, rate in enumerate(RATES):
        set_rate(optimizer, rate)
        both = zip(gradients(module, 0, step), gradients(module, 1, step), strict=True)
        for parameter, (first, second) in zip(module.parameters(), both, strict=True):
            parameter.grad = first + second
        optimizer.step()
    return [each.detach().numpy() for each in module.parameters()]


@pytest.mark.parametrize("name", NAMES)
def test_servers_make_the_workers_steps(job, name):
    """So one server and three give the same."""
    (found, divided), (others, _) = job.all(lambda store: on_servers(store, name))
    assert (divided == 0) == (name in LARGE_BATCH)
    for own, other, expected in zip(found, others, on_a_worker(name), strict=True):
        assert np.array_equal(own, other)
        np.testing.assert_allclose(own, expected, rtol=2e-6, atol=5e-7)
