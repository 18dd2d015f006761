"""Networks from MXNet's graphs: they compute what MXNet computes, or the first node that cannot be said is named."""

import json
from pathlib import Path

import numpy as np
import pytest

from dmltrain import layers
from dmltrain.base.errors import UserError
from dmltrain.layers import ShapeError
from dmltrain.mxnet_files import graph, rebuild, weights
from dmltrain.mxnet_files.node_options import NotSupported
from tests.models.mxnet_graphs import GRAPHS, names_of_a_new_process, table
from tests.mxnet_files import made
from tests.mxnet_files.graphs import Written, canonical


def of_mxnet(folder, file):
    """The network of one of MXNet's own graphs, and what its table says."""
    expected = json.loads((folder / f"{file}.json").read_text())
    classes, shape = expected["arguments_of_get_symbol"]["num_classes"], tuple(expected["input"])
    return rebuild.read(folder / f"{file}-symbol.json", classes, shape), expected


@pytest.mark.parametrize("graph", GRAPHS, ids=lambda graph: graph.file)
def test_mxnets_networks_are_rebuilt_and_are_ours(mxnet_networks, graph):
    """The same layers in the same places: dmltrain/models is held against MXNet's own execution elsewhere."""
    rebuilt, expected = of_mxnet(mxnet_networks, graph.file)
    found = rebuilt.network
    assert found.name == graph.file and all(own == other for own, other in rebuilt.names.items())
    fixed = {fixed_gamma.name: list(fixed_gamma.shape) for fixed_gamma in weights.fixed_gammas(found)}
    learned = [(parameter.name, list(parameter.shape)) for parameter in found.parameters()]
    assert learned == [(name, shape) for name, shape in expected["arguments"].items() if name not in fixed]
    assert dict(learned) | fixed == expected["arguments"]
    assert {each.name: list(each.shape) for each in found.auxiliary()} == expected["auxiliary_states"]
    ours = graph.ours(found.num_classes, found.input_shape)
    assert canonical(found.root) == canonical(ours.root)
    names = names_of_a_new_process(parameter.name for parameter in found.parameters())
    assert list(names.values()) == [parameter.name for parameter in ours.parameters()]
    assert set(names.values()) <= table(mxnet_networks, graph.file)["arguments"].keys()
    multipliers = [
        [(parameter.lr_mult, parameter.wd_mult) for parameter in which.parameters()] for which in (found, ours)
    ]
    assert multipliers[0] == multipliers[1]


def random_arrays(network):
    draw = np.random.default_rng(0)
    arrays = {parameter.name: draw.standard_normal(parameter.shape) for parameter in network.parameters()}
    return arrays | {each.name: draw.random(each.shape) + 0.5 for each in network.auxiliary()}


def outputs_of_both(mx, content, rebuilt, dtype):
    """What the rebuilt network computes on PyTorch, and what MXNet makes of the graph itself, before its softmax."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from dmltrain.backends.torch import layers as torch_layers

    network, arrays = rebuilt.network, random_arrays(rebuilt.network)
    images = np.random.default_rng(1).standard_normal((3, *network.input_shape)).astype(dtype)
    module = torch_layers.build(network).to(getattr(torch, dtype)).eval()
    module.load_state_dict({name: torch.from_numpy(array) for name, array in arrays.items()})
    found = module(torch.from_numpy(images)).detach().numpy()
    theirs = {"data": images, **{rebuilt.names.get(name, name): array for name, array in arrays.items()}}
    symbol = mx.sym.load_json(content.decode())
    if symbol.name == "softmax":
        symbol = symbol.get_children()[0]
    executor = symbol.simple_bind(mx.cpu(), data=images.shape, grad_req="null", type_dict={"data": dtype})
    for name, each in {**executor.arg_dict, **executor.aux_dict}.items():
        each[:] = mx.nd.array(theirs.get(name, np.full(each.shape, 7)), dtype=dtype)  # 7: a fixed gamma, which is 1
    return found, executor.forward(is_train=False)[0].asnumpy()


@pytest.mark.parametrize("name", ["windows", "shared", "gluon", "response", "transformed"])
def test_a_rebuilt_network_computes_what_mxnet_computes(mx, name):
    content = getattr(made, name)().content()
    rebuilt = rebuild.rebuild(graph.parse(content), "net", 10, (3, 9, 9))
    dtype, most = ("float32", 1e-4) if name == "response" else ("float64", 1e-9)  # MXNet's LRN has no float64
    found, expected = outputs_of_both(mx, content, rebuilt, dtype)
    assert np.abs(found - expected).max() <= most * np.abs(expected).max()


# -- old and other files ----------------------------------------------------------------------------------------------


def test_other_names_of_arrays_are_mapped():
    rebuilt = made.gluon().rebuilt()
    names, network = rebuilt.names, rebuilt.network
    assert names["net0_batchnorm0_moving_mean"] == "net0_batchnorm0_running_mean"
    assert names["last_fwd_weight"] == "w" and names["last_fwd_bias"] == "b"
    own = random_arrays(network)
    for found in ({names[name]: each for name, each in own.items()}, own):  # theirs, and what dmltrain writes of it
        read = weights.fitting(Path("m-0001.params"), found, network, names)
        assert all(np.array_equal(each, own[name].astype(np.float32)) for name, each in read.items())
        assert read.keys() == own.keys()


def test_a_tuple_of_python_2_and_a_missing_option_are_read():
    options = {"kernel": "(2L, 2L)", "stride": "None", "pad": "()", "pool_type": "avg"}
    network = Written().node("Pooling", "pool", "data", **options).dense("fc", "pool", 10).rebuilt().network
    assert network.layer_calls[0].layer == layers.AvgPool("pool", kernel=2, stride=1, pad=0)


def test_multipliers_of_variables_are_kept():
    graph = made.transformed().attributes("loc_weight", __lr_mult__="0.01", num_hidden="6")
    graph.attributes("loc_bias", lr_mult="3", wd_mult="0.5").norm("bn", "fc", fix_gamma="False")
    graph.attributes("bn_gamma", __wd_mult__="0").attributes("bn_moving_var", __wd_mult__="1.0")  # as gluon exports
    found = {
        parameter.name: (parameter.lr_mult, parameter.wd_mult) for parameter in graph.rebuilt().network.parameters()
    }
    assert found == {
        **{"loc_weight": (0.01, 1), "loc_bias": (3, 0.5), "fc_weight": (1, 1), "fc_bias": (1, 0)},
        **{"bn_gamma": (1, 0), "bn_beta": (1, 0)},
    }


def test_pooling_of_the_oldest_files_rounds_up_and_statistics_have_their_usual_names():
    """They have all options, so one that is missing did not exist; and no auxiliary states."""
    found = {}
    for key in ("param", "attr", "attrs"):
        old = Written(key).norm("bn", "data", **({"kinds": ("gamma", "beta")} if key == "param" else {}))
        old.node("Pooling", "pool", "bn", kernel="(3,3)", stride="(2,2)", pad="(0,0)").dense("fc", "pool", 10)
        network = old.rebuilt().network
        found[key] = [step.layer.rounding for step in network.layer_calls if isinstance(step.layer, layers.MaxPool)]
        assert [each.name for each in network.auxiliary()] == ["bn_moving_mean", "bn_moving_var"]
    assert found == {"param": ["full"], "attr": ["valid"], "attrs": ["valid"]}


def test_what_does_not_lead_to_the_output_is_not_needed():
    content = Written().dense("fc", "data", 10).node("Deconvolution", "other", "data").content("fc")
    network = rebuild.rebuild(graph.parse(content), "net", 10, (3, 8, 8)).network
    assert [parameter.name for parameter in network.parameters()] == ["fc_weight", "fc_bias"]


# -- what cannot be said ----------------------------------------------------------------------------------------------


def one(op, *inputs, **options):
    return Written().node(op, "it", "data", *inputs, **options)


def twice(first, second):
    graph = Written().node("FullyConnected", "one", "data", *first, num_hidden="10")
    return graph.node("FullyConnected", "two", "one", *second, num_hidden="10")


def pooled(**options):
    return Written().node("Pooling", "pool", "data", **{"kernel": "(2, 2)", **options}).dense("fc", "pool", 10)


def convolved(**options):
    return Written().node("Convolution", "it", "data", "w", "b", **{"kernel": "(1, 1)", "num_filter": "4", **options})


AFFINE = Written().convolution("a", "data", 1).dense("loc", "data", 6)
FLAT = Written().node("Flatten", "f", "data").node("Pooling", "p", "f", kernel="(1, 1)", global_pool="1")
UNEQUAL = Written().convolution("a", "data", 2).node("broadcast_add", "s", "a", "data")
OTHER = Written().convolution("a", "data", 3).node("elemwise_add", "s", "a", "other")


def rule(**attributes):
    return Written().dense("fc", "data", 10).attributes("fc_weight", **attributes)


REFUSED = {
    "operator": (one("Deconvolution"), r"node 'it' \(Deconvolution\): .*; supported: Act"),
    "activation": (one("Activation", act_type="softsign"), "act_type=softsign .*: relu, tanh"),
    "no activation": (one("Activation"), "act_type=nothing .*: relu, tanh"),
    "dilated": (convolved(dilate="(2, 2)"), r"node 'it' .*: dilate=\(2,2\) .*: \(1,1\)"),
    "layout": (convolved(layout="NHWC"), "layout=NHWC .*: NCHW"),
    "one dimension": (convolved(kernel="(3,)"), r"kernel is \(3,\)"),
    "no kernel": (convolved(kernel=""), "kernel is missing"),
    "no number": (convolved(num_group="two"), "num_group is two"),
    "no channels": (convolved(num_filter="None"), "num_filter is missing"),
    "flag": (convolved(no_bias="maybe"), "no_bias=maybe .*: True, False"),
    "unknown option": (convolved(precision="high"), "precision=high"),
    "sum": (pooled(pool_type="sum"), "pool_type=sum .*: max, avg"),
    "same": (pooled(pooling_convention="same"), "pooling_convention=same .*: valid, full"),
    "too large": (pooled(kernel="(9, 9)"), r"node 'pool' \(Pooling\): .*kernel 9x9 .* input 3x8x8"),
    "global of flat": (FLAT, "node 'p' .*is not an image"),
    "statistics": (Written().norm("bn", "data", use_global_stats="True"), "use_global_stats=True"),
    "axis": (one("Concat", "data", dim="2"), "dim=2 .*: 1"),
    "always": (one("Dropout", mode="always"), "mode=always .*: training"),
    "shape": (one("Reshape", shape="(0, 5)"), r"shape=\(0,5\) .*: \(0,-1\)"),
    "integers": (one("Cast", dtype="int8"), "dtype=int8"),
    "zero": (one("_div_scalar", scalar="0"), "divides by zero"),
    "flatten": (Written().dense("fc", "data", 10, flatten="False"), "flatten=False .*flat inputs"),
    "shapes": (UNEQUAL, "node 's' .*different shapes"),
    "no input": (Written().node("relu", "r"), "node 'r' .*no input"),
    "arrays": (one("Convolution", "w", kernel="(1, 1)"), "1 arrays, expected 2: weight, bias"),
    "no statistics": (Written().norm("bn", "data", kinds=("gamma", "beta")), "2 arrays, expected 4: gamma"),
    "shared weight": (twice(("w", "b"), ("w", "c")), "node 'two' .*shares its array 'w'"),
    "computed weight": (twice(("w", "b"), ("one", "c")), "'one' is computed"),
    "second input": (OTHER, "node 's' .*'other' is a second input"),
    "crossing": (made.crossing(), r"node 'end' .*shares node 'a' \(Convolution\)"),
    "not neighbours": (made.not_neighbours(), r"node 'end' .*shares node 'stem' \(Convolution\)"),
    "nested": (made.nested(51), "more than 50 branches"),
    "transformer": (AFFINE.node("SpatialTransformer", "s", "a", "loc", target_shape="(2, 2)"), "its first input"),
    "wrong multiplier": (rule(__lr_mult__="much"), "'fc_weight': could not convert"),
    "negative multiplier": (rule(__wd_mult__="-1"), "'fc_weight': wd_mult"),
    "classes": (Written().dense("fc", "data", 11), r"output is 11, expected \(10,\)"),
    "no layer": (one("SoftmaxOutput"), "its output, node 'it' .*no layer"),
    "nothing": (Written().node("SoftmaxOutput", "softmax"), r"its output, node 'softmax' \(SoftmaxOutput\).*no layer"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_the_first_node_that_cannot_be_said_is_named(case):
    graph, reason = REFUSED[case]
    with pytest.raises((NotSupported, ShapeError), match=reason):
        graph.rebuilt()


def test_the_error_names_the_file_and_the_first_of_several_nodes_or_that_images_or_classes_do_not_fit(tmp_path):
    path = tmp_path / "m-symbol.json"
    path.write_bytes(Written().node("Crop", "first", "data").node("Deconvolution", "second", "first").content())
    with pytest.raises(UserError) as caught:
        rebuild.read(path, 10, (3, 8, 8))
    for essential in (str(path), "node 'first' (Crop)", "Activation", "dmltrain-launch"):
        assert essential in str(caught.value)
    path.write_bytes(pooled(kernel="(3, 3)").content())
    with pytest.raises(UserError, match="not fit this data set, .*images of 3x2x2 .* 10 classes: node 'pool'"):
        rebuild.read(path, 10, (3, 2, 2))
    with pytest.raises(UserError, match="not fit this data set, .* 9 classes: .*output is 10"):
        rebuild.read(path, 9, (3, 8, 8))


def test_several_outputs_are_refused():
    content = Written().dense("one", "data", 10).dense("two", "data", 10).content("one", "two")
    with pytest.raises(NotSupported, match=r"2 outputs: node 'one' \(FullyConnected\), node 'two'"):
        rebuild.rebuild(graph.parse(content), "net", 10, (3, 8, 8))


def test_without_a_number_of_classes_the_network_has_its_own():
    assert Written().dense("fc", "data", 7).rebuilt(num_classes=None).network.num_classes == 7


def test_a_deep_and_a_long_network_are_rebuilt_and_a_tangled_one_refused_after_limited_steps(monkeypatch):
    """5,000,000 take ten seconds."""
    assert made.nested(50).rebuilt().network.num_parameters == 3 * 64 * 10 + 10
    monkeypatch.setattr(rebuild, "MAX_STEPS", rebuild.MAX_STEPS // 50)
    assert made.long(300).rebuilt().network.num_parameters == 1930
    with pytest.raises(NotSupported, match="node 'end' .*too many branches"):
        made.tangled(400).rebuilt()
