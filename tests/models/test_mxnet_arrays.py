"""Names, shapes, order and number of all arrays are those of MXNet's own graphs of its networks."""

from math import prod

import pytest

from dmltrain import models
from dmltrain.layers import BatchNorm
from tests.models.mxnet_graphs import GRAPHS, table
from tests.models.other_networks import usual


@pytest.mark.parametrize("graph", GRAPHS, ids=lambda graph: graph.file)
def test_arrays_are_mxnets(graph, mxnet_networks):
    expected = table(mxnet_networks, graph.file)
    arguments = expected["arguments"]
    classes = expected["arguments_of_get_symbol"]["num_classes"]
    network = graph.ours(classes, tuple(expected["input"]))
    fixed = {
        f"{step.layer.name}_gamma": step.input_shape[:1]
        for step in network.steps
        if isinstance(step.layer, BatchNorm) and step.layer.fixed_scale
    }
    assert {name: arguments[name] for name in fixed} == fixed  # no parameters here, constants there
    learned = [(name, shape) for name, shape in arguments.items() if name not in fixed]
    assert [(each.name, each.shape) for each in network.parameters()] == learned
    auxiliary = {each.name: list(each.shape) for each in network.auxiliary()}
    assert auxiliary == expected["auxiliary_states"]
    assert network.num_parameters + sum(prod(shape) for shape in fixed.values()) == expected["parameters"]


def test_every_graph_has_a_network(mxnet_networks):
    files = {path.name.removesuffix("-symbol.json") for path in mxnet_networks.glob("*-symbol.json")}
    assert {graph.file for graph in GRAPHS} == files


def test_the_usual_form_of_every_network_is_built():
    """At its usual size it has the usual number of logits."""
    for name, row in models.NETWORKS.items():
        assert usual(name).output_shape == (row.num_classes,)
