"""--factors: which dense layers send sufficient factors, and training programs whose layers do."""

import itertools

import numpy as np
import pytest
import torch
from torch import fx, nn
from torch.nn import functional

from dmltrain.backends.torch.distributed import choice, distribute, gates
from dmltrain.backends.torch.distributed.choice import Layer, Trial, decide, sizes
from dmltrain.backends.torch.trainer import TorchTrainer
from dmltrain.errors import UserError
from dmltrain.options import parse
from tests.backends.factored_net import Net
from tests.backends.trainers import MLP, batch, torch_trainer
from tests.kvstore.whole_job import WholeJob


@pytest.fixture
def job():
    made = WholeJob()
    yield made
    made.close()


SHARES = [(16, 16), (16, 0), (3, 16)]  # samples of the workers


def train(made, own, twice):
    """Three steps with these samples of each; `twice`: each of two batches, which are the same."""
    for seed, counts in enumerate(SHARES):
        images, labels = (each[own(counts)] for each in batch(count=32, seed=seed))
        if twice:
            made.accumulate(images, labels, 2 * sum(counts))
        made.train_step(images, labels, sum(counts) * (2 if twice else 1), 0.1)
    made.synchronize()
    return made.state()["model"]


@pytest.mark.parametrize("line", ["", "--macrobatch-size 64", "--gc-type bf16"])
def test_a_trainer_takes_the_same_steps_with_factors(job, line):
    """In the second step one of the workers has no samples. Other layers stay compressed."""
    twice = "--macrobatch-size" in line

    def one(store):
        made = torch_trainer(MLP, f"--factors auto --batch-size 16 {line}", store)

        def own(counts):
            return slice(0, counts[0]) if store.rank == 0 else slice(counts[0], sum(counts))

        return train(made, own, twice), made.choices()

    (found, choices), (other, _) = job.all(one)
    assert all(torch.equal(value, other[name]) for name, value in found.items())
    assert len(choices) == 3 and choices[0].startswith("Layer fc1_weight (128 x 64) sends factors: ")
    if "bf16" not in line:  # there gradients are rounded, and factors are not
        for name, value in train(torch_trainer(), lambda counts: slice(0, sum(counts)), twice).items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)


def test_a_resumed_training_sends_the_same_layers_factors(job, monkeypatch):
    """Also if a new measurement would choose others; residuals of the compressed layers come back with them."""
    options = parse(["--kv-store", "dist_sync", "--batch-size", "4", "--factors", "auto", "--gc-type", "int8"])

    def one(store):
        first = TorchTrainer(MLP, options, store)
        images, labels = np.ones((4, 1, 8, 8), np.float32), np.zeros(4, np.int64)
        first.train_step(images, labels, 8, 0.1)
        first.synchronize()
        return first.state(store.residuals()), first.choices()

    (state, choices), _ = job.all(one)
    assert state["factored"] and len(state["factored"]) < len(choices)
    job.close()
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
    assert list(gates.dense_weights(traced(lambda graph, w: w))) == ["w"]
    assert not gates.dense_weights(traced(lambda graph, w: graph.call_function(torch.mul, (w, 2))))
    assert not gates.dense_weights(nn.Sequential(nn.utils.spectral_norm(nn.Linear(3, 3))))
    assert list(gates.dense_weights(Net())) == ["first.weight", "last.weight"]
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
    assert list(gates.dense_weights(nn.Sequential(normed, nn.Linear(3, 2)))) == ["1.weight"]


def test_alexnet_needs_a_fourteenth_of_its_bytes():
    """Caffe's AlexNet, batch 32, on five hosts: 390 MB of gradients a host, 28.6 MB with factors."""
    dense = [Layer("fc6", 4096, 9216), Layer("fc7", 4096, 4096), Layer("fc8", 1000, 4096)]
    every = [sizes(layer, 32, 5, 1.0) for layer in dense]
    rest = 2 * 4 / 5 * 4 * (60_965_224 - sum(layer.outputs * layer.inputs for layer in dense))
    assert sum(gradients for gradients, _ in every) + rest == pytest.approx(390.2e6, rel=1e-3)
    assert sum(factors for _, factors in every) + rest == pytest.approx(28.6e6, rel=1e-2)


LAYER = Layer("fc", 4096, 4096)


LATE, FAST, UNLIKE = Trial(0.01, 0.90, True, 125e6), Trial(0.01, 0.05, True, 125e6), Trial(0.01, 0.05, False, 125e6)


@pytest.mark.parametrize(
    "rows, ratio, trial, as_factors, said",
    [
        (32, 1.0, FAST, True, "the product takes 40.0 ms longer, the network 825.4 ms less"),
        (32, 1.0, LATE, False, "the product takes 890.0 ms longer, the network 825.4 ms less"),
        (32, 1.0, UNLIKE, False, "the workers' processors round products differently"),
        (32, 1.0, Trial(0.01, 0.05, True, -1.0), True, "they are smaller; the network's rate is not known"),
        (32, 1.0, Trial(0.01, 0.05, True, 0.0), False, "workers and servers share memory, without a network"),
        (1024, 1.0, FAST, False, "factors are not smaller"),
        (32, 0.02, FAST, False, "factors are not smaller"),
    ],
)
def test_a_layer_sends_factors_if_that_is_smaller_faster_and_exact(rows, ratio, trial, as_factors, said):
    found = decide(LAYER, rows, 5, ratio, trial)
    assert (found.as_factors, found.reason) == (as_factors, said)
    assert f"fc (4096 x 4096) sends {'factors' if as_factors else 'gradients'}: {said} (" in str(found)


def test_all_workers_choose_the_same_from_the_slowest(job, monkeypatch):
    """Here one worker's products differ, as those of another processor could."""

    def one(store):
        model = nn.Sequential(nn.Linear(300, 200), nn.Linear(200, 3))
        return distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), store, factors=4).choices

    first, second = job.all(one)
    assert first == second and [each.as_factors for each in first] == [True, False]
    count = itertools.count()
    monkeypatch.setattr(choice, "_digest", lambda product: next(count))
    assert {each[0].reason for each in job.all(one)} == {"the workers' processors round products differently"}
