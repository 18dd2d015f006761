"""Our networks compute what MXNet's own graphs of its networks compute, on both backends, with the same weights.

Logits by moving and by batch statistics, the gradient of every array and the moving statistics after a step, in
float64 within 1e-9 of each array's largest value. MXNet has no float64 LocalResponseNorm; such a network is compared in
float32 within 1e-4. Dropout is off in the graph and in ours.
"""

import re

import pytest

from dmltrain import layers
from tests.backends.both import (
    difference,
    in_mxnet,
    in_torch,
    mxnets_statistics,
    np,
    random,
    torch,
    torch_layers,
    wild_arrays,
)
from tests.backends.its_own_graph import in_its_graph, without_onednn
from tests.models.changed import with_last_pooling, without_dropout
from tests.models.mxnet_graphs import GRAPHS, table

pytestmark = [
    pytest.mark.filterwarnings("ignore:Please import `csr_matrix`:DeprecationWarning"),  # MXNet's own
    pytest.mark.usefixtures("freed"),
]


def undone_biases(network):
    """Name of a bias that the batch norm behind it undoes, so that its gradient is noise around 0 -> of its weight."""
    pairs = zip(network.steps, network.steps[1:], strict=False)
    convs = [
        here.layer
        for here, behind in pairs
        if isinstance(here.layer, layers.Conv) and here.layer.bias and isinstance(behind.layer, layers.BatchNorm)
    ]
    return {f"{conv.name}_bias": f"{conv.name}_weight" for conv in convs}


class Closest(torch.fx.Interpreter):
    """`margin`: of all ReLUs and maxima the one closest to another decision, relative to the root mean square of what
    is decided upon. Equal zeros of a maximum are no decision: the ReLU before them passes no gradient."""

    margin = float("inf")

    def call_function(self, target, arguments, options):
        x = arguments[0]
        if target in (torch.relu, torch.relu_):
            self.note(x.abs(), x)
        elif target is torch.nn.functional.max_pool2d:
            windows = torch.nn.functional.unfold(
                x.flatten(0, 1)[:, None], options["kernel_size"], stride=options["stride"]
            )
            first, second = windows.topk(2, dim=1).values.unbind(1)
            self.note((first - second)[first > 0], x)
        return super().call_function(target, arguments, options)

    def note(self, distances, x):
        self.margin = min(self.margin, (distances.min() / x.square().mean().sqrt()).item())


class Case:
    """One of MXNet's graphs with our network, random arrays and a batch, and what MXNet makes of them."""

    def __init__(self, graph, folder):
        known = table(folder, graph.file)
        shape = (known["input"][0], graph.pixels, graph.pixels)
        classes = known["arguments_of_get_symbol"]["num_classes"]
        network = graph.ours(classes, tuple(known["input"]) if graph.last else shape)
        self.network = without_dropout(with_last_pooling(network, graph.pixels, graph.last) if graph.last else network)
        normalises = any(isinstance(step.layer, layers.LocalResponseNorm) for step in network.steps)
        dtype, self.bar = ("float32", 1e-4) if normalises else ("float64", 1e-9)
        self.arrays = wild_arrays(self.network, dtype)
        self.images = random(graph.images, *shape, seed=graph.seed, dtype=dtype)
        self.weights = random(graph.images, network.num_classes, seed=4, dtype=dtype)
        names = [each.name for each in self.network.parameters()]
        self.undone = undone_biases(self.network)
        self.undone |= {name: names[-2] for name in names if re.fullmatch(graph.undone, name)}
        path = folder / f"{graph.file}-symbol.json"
        self.expected = (without_onednn if normalises else in_its_graph)(path, graph.last, *self.given())

    def given(self):
        return self.network, self.arrays, self.images, self.weights

    def compare(self, backend):
        found, expected = backend(*self.given()), self.expected
        assert difference(found.evaluated, expected.evaluated) < self.bar
        assert difference(found.trained, expected.trained) < self.bar
        for name, gradient in expected.gradients.items():
            scale = np.abs(expected.gradients[self.undone.get(name, name)]).max()
            assert np.abs(found.gradients[name] - gradient).max() < self.bar * scale, name
        statistics = found.statistics
        if backend is in_torch:
            statistics = mxnets_statistics(self.network, self.arrays, statistics, len(self.images))
        for name, values in statistics.items():
            assert difference(values, expected.statistics[name]) < 1e-6, name  # MXNet's momentum is float32


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(graph, id=graph.file, marks=[] if graph.quick else [pytest.mark.thorough]) for graph in GRAPHS
    ],
)
def case(request, mxnet_networks):
    return Case(request.param, mxnet_networks)


def test_torch_computes_what_mxnets_graph_does(case):
    case.compare(in_torch)


def test_the_mxnet_backend_computes_what_mxnets_graph_does(case):
    case.compare(in_mxnet)


def test_the_comparison_means_something(case):
    """Nothing has vanished, overflowed or is the same for all images, and float32 rounding decides nothing."""
    reference = case.expected
    for values in (reference.evaluated, reference.trained):
        assert np.isfinite(values).all()
        assert 1e-3 < np.abs(values).max() < 1e6
        assert len(values) == 1 or np.ptp(values, axis=0).max() > 1e-3 * np.abs(values).max()
    largest = [np.abs(each).max() for name, each in reference.gradients.items() if name not in case.undone]
    assert min(largest) > 1e-6 and max(largest) < 1e9
    if case.images.dtype == np.float32:
        assert closest_decision(case) > 5e-5  # by the choice of the images (Graph.seed)


def closest_decision(case):
    module = torch_layers.build(case.network).double()
    module.load_state_dict({name: torch.from_numpy(each).double() for name, each in case.arrays.items()})
    closest = Closest(module.train())
    closest.run(torch.from_numpy(case.images).double())
    return closest.margin
