"""Optimizers on real servers: one server and three make the steps that the workers would make, slice or not. Each push
to dcasgd is compensated for the steps that its worker had not pulled."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from dmltrain import optimizers
from dmltrain.backends.torch import layers as torch_layers
from dmltrain.backends.torch.optimizer import make_optimizer, set_rate
from dmltrain.backends.torch.server_optimizer import SliceOptimizer
from dmltrain.layers import Dense, Flatten, Network, Rule, chain
from dmltrain.options import parse
from tests.connected import connected
from tests.kvstore.whole_job import WholeJob

NETWORK = Network(  # the first weight has 600 KB, more than two slices
    "mlp",
    chain(Flatten(), Dense("large", 300, weight_rule=Rule(lr_mult=0.5)), Dense("fc", 3, bias_rule=Rule(wd_mult=2.0))),
    (2, 16, 16),
    3,
)
RATES = (0.02, 0.02, 0.005)
LARGE_BATCH = ("lamb", "lars", "lbsgd", "muon", "sgld")  # their keys are whole
NAMES = [name for name in optimizers.NAMES if name != "dcasgd"]  # see below


@pytest.fixture(scope="module", params=[1, 3], ids="{} servers".format)
def job(request) -> Iterator[WholeJob]:
    made = WholeJob(workers=2, servers=request.param, make_step=SliceOptimizer)
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
    return [torch.randn(parameter.shape, generator=draw) for parameter in module.parameters()]


def on_servers(store, name):
    """The weights of one worker after these steps, and how many keys are divided."""
    module, inner = made(name)
    optimizer = connected(module, inner, store, average=False, overlap=False, update_on_kvstore=True)
    for step, rate in enumerate(RATES):
        set_rate(optimizer, rate)
        for parameter, gradient in zip(module.parameters(), gradients(module, store.rank, step), strict=True):
            parameter.grad = gradient
        optimizer.step()
        optimizer.settle()
    buckets = optimizer._exchange.gradients.buckets
    divided = [len(store._entries.find(bucket.name).slices) > 1 for bucket in buckets]
    return [parameter.detach().numpy().copy() for parameter in module.parameters()], sum(divided)


def on_a_worker(name):
    module, optimizer = made(name)
    for step, rate in enumerate(RATES):
        set_rate(optimizer, rate)
        both = zip(gradients(module, 0, step), gradients(module, 1, step), strict=True)
        for parameter, (first, second) in zip(module.parameters(), both, strict=True):
            parameter.grad = first + second
        optimizer.step()
    return [parameter.detach().numpy() for parameter in module.parameters()]


@pytest.mark.parametrize("name", NAMES)
def test_servers_make_the_workers_steps(job, name):
    """So one server and three give the same."""
    (found, divided), (others, _) = job.all(lambda store: on_servers(store, name))
    assert (divided == 0) == (name in LARGE_BATCH)
    for own, other, expected in zip(found, others, on_a_worker(name), strict=True):
        assert np.array_equal(own, other)
        np.testing.assert_allclose(own, expected, rtol=2e-6, atol=5e-7)


# -- dcasgd ------------------------------------------------------------------------------------------------------------

RATE, LAMDA, MOMENTUM = 0.25, 0.5, 0.5


SPEC = {"name": "dcasgd", "lr": RATE, "lamda": LAMDA, "momentum": MOMENTUM}


@pytest.fixture
def asynchronous_job():
    made = WholeJob("dist_async", workers=2, servers=2, staleness=float("inf"), make_step=SliceOptimizer)
    yield made
    made.close()


def test_a_push_is_compensated_for_the_steps_since_its_workers_pull(asynchronous_job):
    size = 200_000  # on both servers
    job = asynchronous_job
    first, second = job.stores
    job.all(lambda store: store.init("w", np.ones(size, np.float32)))
    job.all(lambda store: store.set_optimizer(SPEC))

    def pushed(store, gradient):
        """The value after this worker's push."""
        out = np.empty(size, np.float32)
        store.pushpull("w", np.full(size, gradient, np.float32), out)
        assert (out == out[0]).all()
        return out[0]

    weight, buffer = 1.0, 0.0
    pulled = {first: 1.0, second: 1.0}
    for store, gradient in ((first, 1.0), (first, -2.0), (second, 3.0), (first, 1.5), (second, 0.5)):
        delayed = gradient + LAMDA * gradient * gradient * (weight - pulled[store])
        buffer = MOMENTUM * buffer + delayed
        weight -= RATE * buffer
        pulled[store] = weight
        assert pushed(store, gradient) == pytest.approx(weight, rel=1e-6)
    assert pulled[first] != pulled[second]


def test_without_delay_it_is_sgd():
    values = [np.ones(3, np.float32) for _ in range(3)]
    steps = [SliceOptimizer(SPEC, 0, values[0]), SliceOptimizer(SPEC, 0, values[1])]
    steps.append(SliceOptimizer({"name": "sgd", "lr": RATE, "momentum": MOMENTUM}, 0, values[2]))
    for gradient in (1.0, -2.0, 3.0):
        gradients = np.full(3, gradient, np.float32)
        steps[0](values[0], gradients.copy(), -1.0)
        steps[1](values[1], gradients.copy(), -1.0, values[1].copy())
        steps[2](values[2], gradients.copy(), -1.0)
    np.testing.assert_allclose(values[0], values[2], rtol=1e-6)
    np.testing.assert_allclose(values[1], values[2], rtol=1e-6)
    assert set(steps[1].state()) == {"momentum_buffer"}  # not the pulled weights, which are the server's
