"""Sufficient factors: dense layers whose gradient is sent as two factors, in whole jobs."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import CheckpointError, checkpoint

from dmltrain import models
from dmltrain.backends.torch import layers
from dmltrain.backends.torch.distributed import distribute
from dmltrain.errors import UserError
from tests.backends.factored_net import Net

ROWS = 6
SHARES = [(5, 3), (6, 0), (1, 6)]  # samples of the workers' steps


def batch(count, seed):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(count, 2, 7, generator=draw), torch.randn(count, 2, 3, generator=draw)


def share(store, step):
    """This worker's samples."""
    own = slice(0, SHARES[step][0]) if store.rank == 0 else slice(SHARES[step][0], None)
    return [each[own] for each in batch(sum(SHARES[step]), step)]


def loss_of(model, x, y):
    return (model(x) - y).square().sum()


def weights(model):
    return [each.detach().clone() for each in model.parameters()]


def joined(store, model, lr=0.01, **options):
    return distribute(model, torch.optim.SGD(model.parameters(), lr=lr), store, **options)


BOTH = ["first.weight", "last.weight"]


@pytest.mark.parametrize("defer", [False, True])
@pytest.mark.parametrize("average", [False, True])
def test_weights_equal_those_without_factors_up_to_rounding(job, average, defer):
    """Workers have different numbers of samples, in one step none."""

    def one(store):
        model = Net(store.rank)
        inner = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        made = distribute(model, inner, store, factors=2 * ROWS, average=average, defer=defer, factored=BOTH)
        for step in range(len(SHARES)):
            made.zero_grad()
            loss_of(model, *share(store, step)).backward()
            made.step()
        made.synchronize()
        return weights(model)

    alone = Net(0)
    plain = torch.optim.SGD(alone.parameters(), lr=0.01, momentum=0.9)
    for step, counts in enumerate(SHARES):
        plain.zero_grad()
        (loss_of(alone, *batch(sum(counts), step)) / (2 if average else 1)).backward()
        plain.step()
    for mine, its, expected in zip(*job.all(one), weights(alone), strict=True):
        assert torch.equal(mine, its), "workers never drift apart"
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-6)


def test_gradients_can_be_read_clipped_and_accumulated(job):
    """Each step is of two backward passes, and its gradient is clipped."""

    def one(store, factored):
        model = Net(store.rank)
        inner = torch.optim.SGD(model.parameters(), lr=0.01)
        optimizer = distribute(model, inner, store, factors=4 * ROWS, factored=factored)
        norms = []
        for step in range(2):
            optimizer.zero_grad(set_to_none=step == 0)
            x, y = share(store, step)
            with optimizer.accumulate():
                loss_of(model, x, y).backward()
            loss_of(model, x + 1, y).backward()
            optimizer.reduce_gradients()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
            optimizer.step()
        return weights(model), norms

    results = [job.all(lambda store, names=names: one(store, names)) for names in (BOTH, [])]
    for (found, norms), (expected, others) in zip(*results, strict=True):
        assert norms == pytest.approx(others, rel=1e-5)
        for mine, its in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-6)


def test_evaluation_and_copies_send_nothing(job):
    def one(store):
        model = Net(store.rank)
        optimizer = joined(store, model, factors=ROWS * 2, factored=["first.weight"])
        copied = copy.deepcopy(model)
        for step in range(2):
            with torch.no_grad():
                model(batch(50, 9)[0])
            loss_of(model, *share(store, step)).backward()
            optimizer.step()
        return torch.equal(copied.first.weight, model.first.weight), model.first.weight.detach().clone()

    (same, found), (_, other) = job.all(one)
    assert not same and torch.equal(found, other)


def plainly(model, x, y):
    loss_of(model, x, y).backward()


def penalised(model, x, y):
    (loss_of(model, x, y) + model.first.weight.square().sum()).backward()


def in_bfloat16(model, x, y):
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(model, x, y)
    loss.backward()


def compiled(model, x, y):
    torch.compile(model, backend="eager")(x)


def clipped(model, x, y):
    loss_of(model, x, y).backward()
    nn.utils.clip_grad_norm_([model.first.weight], 1e-3)


@pytest.mark.parametrize(
    "change, rows, said",
    [
        (plainly, 9, "more than 9 samples"),
        (penalised, 2 * ROWS, r"weight of \(40, 7\) .* outside"),  # it is used elsewhere, too
        (in_bfloat16, 2 * ROWS, "float32.*torch.bfloat16"),
        (compiled, 2 * ROWS, "torch.compile"),
        (clipped, 2 * ROWS, "between backward.. and step"),
    ],
)
def test_what_factors_cannot_stand_for_is_refused(job, change, rows, said):
    def one(store):
        model = Net(store.rank)
        optimizer = joined(store, model, factors=rows, factored=["first.weight"])
        with pytest.raises(UserError, match=said):
            change(model, *batch(5, store.rank))
            optimizer.step()

    job.all(one)


@pytest.mark.parametrize(
    "options, said",
    [
        (lambda rank: {"factored": ["tied.weight"]}, "tied.weight .*used once"),
        (lambda rank: {"factors": -1}, "factors=-1"),
        (lambda rank: {"update_on_kvstore": True}, "dist_sync runs it on the servers"),
        (lambda rank: {"factors": 4 + rank}, "factors=4, 5"),
    ],
)
def test_wrong_uses_are_refused(job, options, said):
    def one(store):
        with pytest.raises(UserError, match=said):
            joined(store, Net(store.rank), **{"factors": 4, **options(store.rank)})

    job.all(one)


# -- gradients that programs discard, or compute for something else ---------------------------------------------------


def discards(model, optimizer, x, y, zero_grad=None):
    with optimizer.accumulate():
        loss_of(model, x * 3, y).backward()
    (zero_grad or optimizer.zero_grad)()
    loss_of(model, x, y).backward()
    optimizer.step()
    optimizer.zero_grad()


def discards_by_the_model(model, optimizer, x, y):
    discards(model, optimizer, x, y, model.zero_grad)


def discards_everything(model, optimizer, x, y):
    with optimizer.accumulate():
        loss_of(model, x, y).backward()
    model.zero_grad()
    optimizer.step()


def asks_for_gradients_of_inputs(model, optimizer, x, y):
    x.requires_grad_()
    with optimizer.accumulate():
        torch.autograd.grad(loss_of(model, x, y), x)
        loss_of(model, x, y).backward()
    (penalty,) = torch.autograd.grad(loss_of(model, x, y), x)
    loss_of(model, x + penalty.detach(), y).backward()
    optimizer.step()
    optimizer.zero_grad()


def freezes_a_layer(model, optimizer, x, y):
    model.last.weight.requires_grad_(False)
    optimizer.zero_grad()
    loss_of(model, x, y).backward()
    optimizer.step()


def calls_a_layer_twice(model, optimizer, x, y):
    optimizer.zero_grad()
    (loss_of(model, x, y) + model(x * 2).sum()).backward()
    optimizer.step()


def uses_keywords(model, optimizer, x, y):
    model.first.forward = lambda given: functional.linear(weight=model.first.weight, input=given, bias=model.first.bias)
    calls_a_layer_twice(model, optimizer, x, y)


@pytest.mark.parametrize(
    "train",
    [
        *(discards, discards_by_the_model, discards_everything, asks_for_gradients_of_inputs),
        *(freezes_a_layer, calls_a_layer_twice, uses_keywords),
    ],
)
def test_factors_follow_what_the_program_does_with_gradients(job, train):
    """Each worker trains its model twice, with factors and without: `train(model, optimizer, x, y)` in three steps."""

    def one(store, factored):
        model = Net(store.rank)
        inner = torch.optim.SGD((each for each in model.parameters()), lr=0.01, momentum=0.9)
        optimizer = distribute(model, inner, store, factors=8 * ROWS, factored=factored)
        for step in range(len(SHARES)):
            train(model, optimizer, *share(store, step))
        optimizer.settle()
        return weights(model)

    found, expected = (job.all(lambda store, names=names: one(store, names)) for names in (BOTH, []))
    for mine, its in zip(found[0] + found[1], expected[0] + expected[1], strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-6)


def test_a_recomputed_forward_is_an_error_and_no_wrong_gradient(job):
    """torch.utils.checkpoint saves other tensors the second time, which torch notices."""

    def one(store):
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        forward = model.forward
        model.forward = lambda x: checkpoint(forward, x, use_reentrant=False)
        joined(store, model, factors=8, factored=["0.weight"])
        with pytest.raises((CheckpointError, UserError)):
            model(torch.ones(2, 4, requires_grad=True)).sum().backward()

    job.all(one)


def test_training_inside_compiler_disable_is_not_taken_for_compiled_code(job):
    def one(store):
        model = Net(store.rank)
        optimizer = joined(store, model, factors=2 * ROWS, factored=["first.weight"])

        @torch.compiler.disable
        def step():
            loss_of(model, *share(store, 0)).backward()
            optimizer.step()

        step()
        return weights(model)

    first, second = job.all(one)
    assert all(map(torch.equal, first, second))


def test_copies_of_straight_line_models_can_be_made(job):
    def one(store):
        network = models.create("mlp", None, 10, (1, 4, 4))
        model = layers.build(network)
        layers.initialise(model, network, 0)
        joined(store, model, factors=4, factored=["fc1_weight"])
        return copy.deepcopy(model)(torch.ones(2, 1, 4, 4)).shape

    assert set(job.all(one)) == {(2, 10)}
