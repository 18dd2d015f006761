"""Sufficient factors: dense layers whose gradient is sent as two factors, in whole jobs."""

import copy
import itertools

import numpy as np
import pytest
import torch
from torch import fx, nn
from torch.nn import functional
from torch.utils.checkpoint import CheckpointError, checkpoint

from dmltrain import models
from dmltrain.backends.torch import layers
from dmltrain.backends.torch.distributed import choice, parameter_hooks
from dmltrain.backends.torch.distributed.choice import DenseLayer, ProductTrial, decide, sizes
from dmltrain.backends.torch.trainer import TorchTrainer
from dmltrain.base.errors import UserError
from dmltrain.options import parse
from tests.backends import trainers
from tests.backends.factored_net import Net
from tests.backends.trainers import MLP, torch_trainer
from tests.connected import connected
from tests.kvstore.whole_job import WholeJob

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
    return [parameter.detach().clone() for parameter in model.parameters()]


def joined(store, model, lr=0.01, **options):
    return connected(model, torch.optim.SGD(model.parameters(), lr=lr), store, **options)


BOTH = ["first.weight", "last.weight"]


@pytest.mark.parametrize("defer", [False, True])
@pytest.mark.parametrize("average", [False, True])
def test_weights_equal_those_without_factors_up_to_rounding(job, average, defer):
    """Workers have different numbers of samples, in one step none."""

    def one(store):
        model = Net(store.rank)
        inner = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        made = connected(model, inner, store, factors=2 * ROWS, average=average, defer=defer, factored=BOTH)
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
        optimizer = connected(model, inner, store, factors=4 * ROWS, factored=factored)
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


def freezes(model, x, y):
    model.last.weight.requires_grad_(False)
    loss_of(model, x, y).backward()


@pytest.mark.parametrize(
    "change, rows, said",
    [
        (plainly, 9, "more than 9 samples"),
        (penalised, 2 * ROWS, r"weight of \(40, 7\) .* outside"),  # it is used elsewhere, too
        (in_bfloat16, 2 * ROWS, "float32.*torch.bfloat16"),
        (compiled, 2 * ROWS, "torch.compile"),
        (clipped, 2 * ROWS, "between backward.. and step"),
        (freezes, 2 * ROWS, r"last.weight has no gradient at step\(\)"),
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


def asks_for_gradients_of_inputs(model, optimizer, x, y):
    x.requires_grad_()
    with optimizer.accumulate():
        torch.autograd.grad(loss_of(model, x, y), x)
        loss_of(model, x, y).backward()
    (penalty,) = torch.autograd.grad(loss_of(model, x, y), x)
    loss_of(model, x + penalty.detach(), y).backward()
    optimizer.step()
    optimizer.zero_grad()


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
        *(calls_a_layer_twice, uses_keywords),
    ],
)
def test_factors_follow_what_the_program_does_with_gradients(job, train):
    """Each worker trains its model twice, with factors and without: `train(model, optimizer, x, y)` in three steps."""

    def one(store, factored):
        model = Net(store.rank)
        inner = torch.optim.SGD((parameter for parameter in model.parameters()), lr=0.01, momentum=0.9)
        optimizer = connected(model, inner, store, factors=8 * ROWS, factored=factored)
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


# -- which layers of a network send factors, and training programs ----------------------------------------------------


@pytest.fixture
def new_job():
    made = WholeJob()
    yield made
    made.close()


COUNTS = [(16, 16), (16, 0), (3, 16)]  # samples of the workers


def train(made, own, twice):
    """Three steps with these samples of each; `twice`: each of two batches, which are the same."""
    for seed, counts in enumerate(COUNTS):
        images, labels = (each[own(counts)] for each in trainers.batch(count=32, seed=seed))
        if twice:
            made.accumulate(images, labels, 2 * sum(counts))
        made.train_step(images, labels, sum(counts) * (2 if twice else 1), 0.1)
    made.synchronize()
    return made.state()["model"]


@pytest.mark.parametrize("line", ["", "--macrobatch-size 64", "--gc-type bf16"])
def test_a_trainer_takes_the_same_steps_with_factors(new_job, line):
    """In the second step one of the workers has no samples. Other layers stay compressed."""
    twice = "--macrobatch-size" in line

    def one(store):
        made = torch_trainer(MLP, f"--factors auto --batch-size 16 {line}", store)

        def own(counts):
            return slice(0, counts[0]) if store.rank == 0 else slice(counts[0], sum(counts))

        return train(made, own, twice), made.choices()

    (found, choices), (other, _) = new_job.all(one)
    assert all(torch.equal(value, other[name]) for name, value in found.items())
    assert len(choices) == 3 and choices[0].startswith("Layer fc1_weight (128 x 64) sends factors: ")
    if "bf16" not in line:  # there gradients are rounded, and factors are not
        for name, value in train(torch_trainer(), lambda counts: slice(0, sum(counts)), twice).items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)


def test_a_resumed_training_sends_the_same_layers_factors(new_job, monkeypatch):
    """Also if a new measurement would choose others; residuals of the compressed layers come back with them."""
    options = parse(["--kv-store", "dist_sync", "--batch-size", "4", "--factors", "auto", "--gc-type", "int8"])

    def one(store):
        first = TorchTrainer(MLP, options, store)
        images, labels = np.ones((4, 1, 8, 8), np.float32), np.zeros(4, np.int64)
        first.train_step(images, labels, 8, 0.1)
        first.synchronize()
        return first.state(store.residuals()), first.choices()

    (state, choices), _ = new_job.all(one)
    assert state["factored"] and len(state["factored"]) < len(choices)
    new_job.close()
    monkeypatch.setattr(choice, "decide", lambda *_: pytest.fail("it decides again"))
    again = WholeJob()
    try:
        for lines in again.all(lambda store: TorchTrainer(MLP, options, store, state).choices()):
            told = [line.split()[1] for line in lines if "sends factors: as told" in line]
            assert told == state["factored"]
    finally:
        again.close()


FACTORS, LINKS = "--factors auto", "--server-shares links"


@pytest.mark.parametrize(
    "option, line, said",
    [
        (FACTORS, "--kv-store dist_async", "dist_async: use --kv-store dist_sync"),
        (FACTORS, "--kv-store local", "local: use --kv-store dist_sync"),
        (FACTORS, "--kv-store dist_sync --update-on-kvstore 1", "use --update-on-kvstore 0"),
        (FACTORS, "--kv-store dist_sync --dtype bfloat16", "--dtype bfloat16: use --dtype float32"),
        (FACTORS, "--kv-store dist_sync --compile", "--compile: use no --compile"),
        (FACTORS, "--kv-store dist_sync --devices cpu:2", "one device for each"),
        (FACTORS, "--kv-store dist_sync --backend mxnet", "--backend mxnet .*use off"),
        (LINKS, "--kv-store dist_ssp", "dist_ssp: use --kv-store dist_sync or dist_local"),
        (LINKS, "--kv-store dist_sync --update-on-kvstore 1", "optimizer on the servers"),
        (LINKS, "--kv-store dist_sync --gc-type int8", "--gc-type int8.*use --gc-type none"),
        (LINKS, "--kv-store dist_sync --backend mxnet", "--backend mxnet .*use equal"),
    ],
)
def test_options_that_exclude_each_other_are_named_with_a_fix(option, line, said):
    with pytest.raises(UserError, match=f"{option}.*{said}"):
        parse([*option.split(), *line.split()])


# -- which layers send factors -----------------------------------------------------------------------------------------


def traced(weight):
    """A model that applies a weight by function: w itself, or what is computed of it."""
    root = nn.Module()
    root.w = nn.Parameter(torch.ones(3, 3))
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.get_attr("w")
    graph.output(graph.call_function(functional.linear, (x,), {"weight": weight(graph, w)}))
    return fx.GraphModule(root, graph)


def test_the_layers_that_could_send_factors():
    assert list(parameter_hooks.dense_weights(traced(lambda graph, w: w))) == ["w"]
    assert not parameter_hooks.dense_weights(traced(lambda graph, w: graph.call_function(torch.mul, (w, 2))))
    assert not parameter_hooks.dense_weights(nn.Sequential(nn.utils.spectral_norm(nn.Linear(3, 3))))
    assert list(parameter_hooks.dense_weights(Net())) == ["first.weight", "last.weight"]
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
    assert list(parameter_hooks.dense_weights(nn.Sequential(normed, nn.Linear(3, 2)))) == ["1.weight"]


def test_alexnet_needs_a_fourteenth_of_its_bytes():
    """Caffe's AlexNet, batch 32, on five hosts: 390 MB of gradients a host, 28.6 MB with factors."""
    dense = [DenseLayer("fc6", 4096, 9216), DenseLayer("fc7", 4096, 4096), DenseLayer("fc8", 1000, 4096)]
    every = [sizes(layer, 32, 5, 1.0) for layer in dense]
    rest = 2 * 4 / 5 * 4 * (60_965_224 - sum(layer.outputs * layer.inputs for layer in dense))
    assert sum(gradients for gradients, _ in every) + rest == pytest.approx(390.2e6, rel=1e-3)
    assert sum(factors for _, factors in every) + rest == pytest.approx(28.6e6, rel=1e-2)


LAYER = DenseLayer("fc", 4096, 4096)


LATE, FAST, UNLIKE = (
    ProductTrial(0.01, 0.90, True, 125e6),
    ProductTrial(0.01, 0.05, True, 125e6),
    ProductTrial(0.01, 0.05, False, 125e6),
)


@pytest.mark.parametrize(
    "rows, ratio, trial, as_factors, said",
    [
        (32, 1.0, FAST, True, "the product takes 40.0 ms longer, the network 825.4 ms less"),
        (32, 1.0, LATE, False, "the product takes 890.0 ms longer, the network 825.4 ms less"),
        (32, 1.0, UNLIKE, False, "the workers' processors round products differently"),
        (32, 1.0, ProductTrial(0.01, 0.05, True, -1.0), True, "they are smaller; the network's rate is not known"),
        (32, 1.0, ProductTrial(0.01, 0.05, True, 0.0), False, "workers and servers share memory, without a network"),
        (1024, 1.0, FAST, False, "factors are not smaller"),
        (32, 0.02, FAST, False, "factors are not smaller"),
    ],
)
def test_a_layer_sends_factors_if_that_is_smaller_faster_and_exact(rows, ratio, trial, as_factors, said):
    found = decide(LAYER, rows, 5, ratio, trial)
    assert (found.as_factors, found.reason) == (as_factors, said)
    assert f"fc (4096 x 4096) sends {'factors' if as_factors else 'gradients'}: {said} (" in str(found)


def test_all_workers_choose_the_same_from_the_slowest(new_job, monkeypatch):
    """Here one worker's products differ, as those of another processor could."""

    def one(store):
        model = nn.Sequential(nn.Linear(300, 200), nn.Linear(200, 3))
        return connected(model, torch.optim.SGD(model.parameters(), lr=0.1), store, factors=4).choices

    first, second = new_job.all(one)
    assert first == second and [each.as_factors for each in first] == [True, False]
    count = itertools.count()
    monkeypatch.setattr(choice, "_digest", lambda product: next(count))
    assert {each[0].reason for each in new_job.all(one)} == {"the workers' processors round products differently"}
