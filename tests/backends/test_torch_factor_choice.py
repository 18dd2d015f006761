"""Which dense layers send sufficient factors."""

import itertools

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
from torch import fx, nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from dmltrain.backends.torch.distributed import choice, distribute, gates  # noqa: E402
from dmltrain.backends.torch.distributed.choice import Layer, Trial, decide, sizes  # noqa: E402
from tests.backends.factored_net import Net  # noqa: E402


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


@pytest.mark.parametrize(
    "rows, ratio, trial, as_factors, said",
    [
        (32, 1.0, Trial(0.01, 0.05, True, 125e6), True, "the product takes 40.0 ms longer, the network 825.4 ms less"),
        (
            32,
            1.0,
            Trial(0.01, 0.90, True, 125e6),
            False,
            "the product takes 890.0 ms longer, the network 825.4 ms less",
        ),
        (32, 1.0, Trial(0.01, 0.05, False, 125e6), False, "the workers' processors round products differently"),
        (32, 1.0, Trial(0.01, 0.05, True, -1.0), True, "they are smaller; the network's rate is not known"),
        (32, 1.0, Trial(0.01, 0.05, True, 0.0), False, "workers and servers share memory, without a network"),
        (1024, 1.0, Trial(0.01, 0.05, True, 125e6), False, "factors are not smaller"),
        (32, 0.02, Trial(0.01, 0.05, True, 125e6), False, "factors are not smaller"),
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
