"""Our networks compute what MXNet's own graphs of its networks compute, on both backends, with the same weights.

Logits by moving and by batch statistics, the gradient of every array and the moving statistics after a step, in
float64 within 1e-9 of each array's largest value. MXNet has no float64 LocalResponseNorm: the identity stands for it in
the graph and in ours, and test_rebuild.py compares the layers. Dropout is off in both.
"""

import json
import re

import numpy as np
import pytest

from dmltrain import layers
from tests.backends import both
from tests.models.changed import LAST_POOLINGS, with_last_pooling, without_dropout, without_response_norm
from tests.models.mxnet_graphs import GRAPHS, names_of_a_new_process, table

pytestmark = pytest.mark.usefixtures("freed")


def undone_biases(network):
    """Name of a bias that the batch norm behind it undoes, so that its gradient is noise around 0 -> of its weight."""
    pairs = zip(network.steps, network.steps[1:], strict=False)
    convs = [
        here.layer
        for here, behind in pairs
        if isinstance(here.layer, layers.Conv) and here.layer.bias and isinstance(behind.layer, layers.BatchNorm)
    ]
    return {f"{conv.name}_bias": f"{conv.name}_weight" for conv in convs}


def in_its_graph(path, last, network, arrays, images, weights):
    """What MXNet makes of the batch with its graph in the file `path`. `last`: of its last pooling (Graph.last)."""
    graph = json.loads(path.read_text())
    for node in graph["nodes"]:
        if node["op"] == "Dropout":
            node["attrs"]["p"] = "0"
        if node["op"] == "LRN":
            node.update(op="identity", attrs={})
        if last and node["name"] in LAST_POOLINGS:
            node["attrs"]["kernel"] = f"({last}, {last})"
    logits = both.mx.sym.load_json(json.dumps(graph)).get_children()[0]
    renamed = names_of_a_new_process(logits.list_arguments())
    return both.in_symbol(logits, network, arrays, images, weights, named=lambda name: renamed.get(name, name))


CASES = [pytest.param(graph, id=graph.file, marks=() if graph.quick else pytest.mark.thorough) for graph in GRAPHS]


@pytest.mark.parametrize("graph", CASES)
def test_both_backends_compute_what_mxnets_graph_does(graph, mxnet_networks):
    known = table(mxnet_networks, graph.file)
    shape = (known["input"][0], graph.pixels, graph.pixels)
    classes = known["arguments_of_get_symbol"]["num_classes"]
    network = without_dropout(graph.ours(classes, tuple(known["input"]) if graph.last else shape))
    network = without_response_norm(with_last_pooling(network, graph.pixels, graph.last) if graph.last else network)
    arrays = both.wild_arrays(network, "float64")
    images = both.random(graph.images, *shape, seed=3, dtype="float64")
    given = network, arrays, images, both.random(graph.images, classes, seed=4, dtype="float64")
    expected = in_its_graph(mxnet_networks / f"{graph.file}-symbol.json", graph.last, *given)

    names, undone = [each.name for each in network.parameters()], undone_biases(network)
    undone |= {name: names[-2] for name in names if re.fullmatch(graph.undone, name)}
    for backend in (both.in_torch, both.in_mxnet):
        found = backend(*given)
        assert both.difference(found.evaluated, expected.evaluated) < 1e-9, backend
        assert both.difference(found.trained, expected.trained) < 1e-9, backend
        for name, gradient in expected.gradients.items():
            scale = np.abs(expected.gradients[undone.get(name, name)]).max()
            assert np.abs(found.gradients[name] - gradient).max() < 1e-9 * scale, (backend, name)
        statistics = found.statistics
        if backend is both.in_torch:
            statistics = both.mxnets_statistics(network, arrays, statistics, len(images))
        for name, values in statistics.items():  # MXNet's momentum is float32
            assert both.difference(values, expected.statistics[name]) < 1e-6, (backend, name)
