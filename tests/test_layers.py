"""The layer vocabulary: shapes, parameters, and what is refused."""

from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmltrain.layers import (
    IDENTITY,
    Add,
    Auxiliary,
    AvgPool,
    BatchNorm,
    Clip,
    Concat,
    Constant,
    Conv,
    Dense,
    Dropout,
    Exactly,
    Flatten,
    GlobalAvgPool,
    LocalResponseNorm,
    MaxPool,
    Network,
    Relu,
    Rule,
    ShapeError,
    SpatialTransformer,
    Xavier,
    add,
    chain,
    concat,
)

IMAGE = (3, 28, 28)


@pytest.mark.parametrize(  # of all layers in networks: backends/test_torch_layers.py, as PyTorch has them
    ("layer", "shape", "expected"),
    [
        (Conv("c", 8, kernel=(1, 7), pad=(0, 3)), (4, 17, 19), (8, 17, 19)),
        (Conv("c", 8, kernel=2, stride=2), (3, 7, 7), (8, 3, 3)),
        (AvgPool(kernel=(2, 3), stride=(2, 3)), (5, 6, 9), (5, 3, 3)),
        (GlobalAvgPool(), (64, 7, 9), (64, 1, 1)),
        (BatchNorm("b"), (10,), (10,)),
        (SpatialTransformer("s", chain(Flatten(), Dense("l", 6)), target=(5, 7)), IMAGE, (3, 5, 7)),
        (Auxiliary("a", chain(Flatten(), Dense("l", 6))), IMAGE, IMAGE),
        (chain(), IMAGE, IMAGE),
        (chain(Conv("c", 8, kernel=5), MaxPool(kernel=2, stride=2), Flatten()), IMAGE, (8 * 12 * 12,)),
        (concat(Conv("c", 8), Conv("d", 4), chain()), IMAGE, (15, 28, 28)),
    ],
)
def test_output_shape(layer, shape, expected):
    assert layer.output_shape(shape) == expected


@given(st.integers(1, 20), st.integers(1, 6), st.integers(1, 5), st.integers(0, 3), st.booleans())
def test_pooled_extent_counts_windows(size, kernel, stride, pad, full):
    if 2 * pad > kernel or size + 2 * pad < kernel:
        return
    starts = list(range(-pad, size + pad, stride))
    whole = [start for start in starts if start + kernel <= size + pad]
    # rounding up adds one overhanging window where whole ones leave something of the padded input uncovered
    overhangs = full and whole[-1] + kernel < size + pad
    layer = MaxPool("p", kernel=kernel, stride=stride, pad=pad, rounding="full" if full else "valid")
    if overhangs and whole[-1] + stride >= size:
        with pytest.raises(ShapeError, match="'p': its last window lies entirely outside"):
            layer.output_shape((1, size, size))
    else:
        assert layer.output_shape((1, size, size)) == (1,) + (len(whole) + overhangs,) * 2


@pytest.mark.parametrize(
    ("layer", "shape", "expected"),
    [
        (Conv("c", 8, kernel=(3, 5)), IMAGE, [("c_weight", (8, 3, 3, 5)), ("c_bias", (8,))]),
        (Conv("c", 8, kernel=3, bias=False, groups=2), (4, 9, 9), [("c_weight", (8, 2, 3, 3))]),
        (Dense("d", 10), (20,), [("d_weight", (10, 20)), ("d_bias", (10,))]),
        (Dense("d", 10, bias=False), (20,), [("d_weight", (10, 20))]),
        (BatchNorm("b", fixed_scale=False), IMAGE, [("b_gamma", (3,)), ("b_beta", (3,))]),
        (BatchNorm("b", fixed_scale=True), IMAGE, [("b_beta", (3,))]),
        (Relu("r"), IMAGE, []),
    ],
)
def test_parameters(layer, shape, expected):
    found = layer.parameters(shape)
    assert [(each.name, each.shape) for each in found] == expected
    assert all(each.name.endswith(each.kind) for each in found)


def test_network_lists_arrays_in_forward_order_and_counts_learned_ones_only():
    body = chain(Conv("a", 4, kernel=3, pad=1, bias=False), BatchNorm("b", fixed_scale=False), Relu())
    network = Network("n", chain(concat(body, Conv("c", 2)), GlobalAvgPool(), Flatten(), Dense("d", 5)), (3, 8, 8), 5)
    names = [parameter.name for parameter in network.parameters()]
    assert names == ["a_weight", "b_gamma", "b_beta", "c_weight", "c_bias", "d_weight", "d_bias"]
    assert [each.name for each in network.auxiliary()] == ["b_moving_mean", "b_moving_var"]
    assert network.num_parameters == 4 * 3 * 9 + 4 + 4 + 2 * 3 + 2 + 5 * 6 + 5
    assert network.output_shape == (5,)


def test_layers_are_values():
    assert Conv("c", 8, kernel=3) == Conv("c", 8, kernel=(3, 3))
    assert hash(chain(Conv("c", 8), Relu())) == hash(chain(Conv("c", 8), Relu()))
    with pytest.raises(FrozenInstanceError):
        Conv("c", 8).channels = 9


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Conv("", 8), "Conv: needs a name"),
        (lambda: Conv("c"), "Conv 'c': channels must be positive, is 0"),
        (lambda: Conv("c", 8, kernel=0), r"Conv 'c': kernel must be positive, is \(0, 0\)"),
        (lambda: Conv("c", 8, stride=(1, 0)), r"Conv 'c': stride must be positive, is \(1, 0\)"),
        (lambda: Conv("c", 8, pad=-1), "Conv 'c': pad must not be negative"),
        (lambda: Clip("c", 6, 0), "Clip 'c': low must be less than high, are 6 and 0"),
        (lambda: Auxiliary("a", weight=-0.1), "Auxiliary 'a': weight must be a number from 0, is -0.1"),
        (lambda: SpatialTransformer("s", target=1), r"'s': target must be at least 2 pixels .* is \(1, 1\)"),
        (lambda: Conv("c", 8, groups=3), "Conv 'c': 8 channels do not divide into 3 groups"),
        (lambda: Conv("c", 8, kernel=(3, 3, 3)), r"Conv 'c': kernel must be one number or \(height, width\)"),
        (lambda: Dense("", 8), "Dense: needs a name"),
        (lambda: Dense("d", 0), "Dense 'd': features must be positive, is 0"),
        (lambda: BatchNorm(), "BatchNorm: needs a name"),
        (lambda: BatchNorm("b", epsilon=0), "BatchNorm 'b': epsilon must be positive, is 0"),
        (lambda: BatchNorm("b", momentum=1.5), r"BatchNorm 'b': momentum must lie in 0..1, is 1.5"),
        (lambda: MaxPool("p", rounding="up"), "MaxPool 'p': rounding must be \"valid\" or \"full\", is 'up'"),
        (lambda: AvgPool("p", kernel=3, pad=2), r"AvgPool 'p': pad \(2, 2\) is more than half of the kernel \(3, 3\)"),
        (lambda: Dropout("o", rate=1.0), r"Dropout 'o': rate must lie in 0..1 \(1 excluded\), is 1.0"),
        (lambda: LocalResponseNorm("l", size=4), "LocalResponseNorm 'l': size must be odd and positive, is 4"),
        (lambda: Concat("j", (Relu(),)), "Concat 'j': needs at least two branches, has 1"),
        (lambda: Add("j"), "Add 'j': needs at least two branches, has 0"),
    ],
)
def test_values_are_checked_at_construction(make, message):
    with pytest.raises(ShapeError, match=message):
        make()


HALVED = Conv("c", 8, kernel=3, stride=2, pad=1)


@pytest.mark.parametrize(
    ("layer", "shape", "message"),
    [
        (Conv("c", 8, kernel=5), (3, 4, 28), "Conv 'c': kernel 5x5 is larger than the input 3x4x28"),
        (Conv("c", 8, kernel=7, pad=1), (3, 4, 4), "Conv 'c': kernel 7x7 with pad 1x1 is larger than the input 3x4x4"),
        (Conv("c", 8), (100,), "Conv 'c': input 100 is not an image"),
        (Conv("c", 8, groups=2), IMAGE, "Conv 'c': the channels of input 3x28x28 do not divide into 2 groups"),
        (AvgPool("p", kernel=7), (336, 2, 2), "AvgPool 'p': kernel 7x7 is larger than the input 336x2x2"),
        (AvgPool(kernel=7), (336, 2, 2), "AvgPool: kernel 7x7 is larger"),
        (MaxPool("p"), (5,), "MaxPool 'p': input 5 is not an image"),
        (GlobalAvgPool("g"), (5,), "GlobalAvgPool 'g': input 5 is not an image"),
        (LocalResponseNorm("l"), (5,), "LocalResponseNorm 'l': input 5 is not an image"),
        (Dense("d", 10), IMAGE, "Dense 'd': input 3x28x28 is not flat; put a Flatten before it"),
        (add(Conv("c", 8), chain(), name="sum"), IMAGE, "'sum': branches have different shapes: 8x28x28, 3x28x28 from"),
        (
            *(concat(HALVED, MaxPool(kernel=3, stride=2), name="both"), IMAGE),
            "Concat 'both': branches differ in more than channels: 8x14x14, 3x13x13 from input 3x28x28",
        ),
        (chain(Flatten(), chain(Relu(), Conv("deep", 8))), IMAGE, "Conv 'deep': input 2352 is not an image"),
        (SpatialTransformer("s", chain(Flatten(), Dense("l", 5))), IMAGE, "'s': its localisation gives 5, expected 6"),
    ],
)
def test_a_layer_that_does_not_fit_is_named_with_the_shapes(layer, shape, message):
    with pytest.raises(ShapeError, match=message):
        layer.output_shape(shape)


WITH_SIDE = chain(Flatten(), Auxiliary("a", Dense("side", 3)), Dense("fc", 4))


@pytest.mark.parametrize(
    ("root", "classes", "message"),
    [
        (chain(Flatten(), Dense("d", 4), Dense("d", 4)), 4, "two layers share the parameter name d_weight, d_bias"),
        (chain(Flatten(), Dense("d", 4)), 3, r"network n: output is 4, expected \(3,\), one logit per class"),
        (chain(), 1, "network n: output is 1x2x2, expected"),
        (WITH_SIDE, 4, r"network n: output of Auxiliary 'a' is 3, expected \(4,\), one logit"),
    ],
)
def test_a_network_has_names_of_its_own_and_one_logit_per_class(root, classes, message):
    with pytest.raises(ShapeError, match=message):
        Network("n", root, (1, 2, 2), classes)


def test_branches_of_transformers_and_of_auxiliary_outputs_are_part_of_the_network():
    locate = chain(Flatten(), Dense("locate", 6))
    side = chain(Flatten(), Dense("side", 4))
    root = chain(SpatialTransformer("s", locate, target=8), Auxiliary("a", side, 0.3), Flatten(), Dense("fc", 4))
    network = Network("n", root, (1, 8, 8), 4)
    names = [parameter.name for parameter in network.parameters()]
    assert names == ["locate_weight", "locate_bias", "side_weight", "side_bias", "fc_weight", "fc_bias"]
    assert [(auxiliary_output.name, auxiliary_output.weight) for auxiliary_output in network.auxiliary_outputs] == [
        ("a", 0.3)
    ]


def test_biases_and_betas_do_not_decay():
    norm = BatchNorm("b", fixed_scale=False)
    for layer, shape in ((Conv("c", 2), IMAGE), (Dense("d", 2), (4,)), (norm, IMAGE)):
        for parameter in layer.parameters(shape):
            assert (parameter.lr_mult, parameter.wd_mult) == (1.0, float(parameter.kind in ("weight", "gamma"))), (
                parameter.name
            )
            assert parameter.initial is None


@pytest.mark.parametrize("make", [lambda **rules: Conv("l", 2, **rules), lambda **rules: Dense("l", 2, **rules)])
def test_rules_of_a_layer_reach_its_arrays(make):
    layer = make(weight_rule=Rule(Xavier(), 0.5, 3), bias_rule=Rule(Constant(0.2), lr_mult=2, wd_mult=1))
    weight, bias = layer.parameters((4, 1, 1) if isinstance(layer, Conv) else (4,))
    assert (weight.initial, weight.lr_mult, weight.wd_mult) == (Xavier(), 0.5, 3)
    assert (bias.initial, bias.lr_mult, bias.wd_mult) == (Constant(0.2), 2, 1)
    weight, bias = make(bias_rule=Rule(Exactly(IDENTITY[:2]))).parameters(weight.shape[1:])
    assert (weight.initial, weight.wd_mult, bias.initial, bias.wd_mult) == (None, 1, Exactly((1.0, 0.0)), 0)


def test_rules_of_a_batch_norm_reach_its_arrays():
    norm = BatchNorm("b", fixed_scale=False, gamma_rule=Rule(lr_mult=0.1, wd_mult=0), beta_rule=Rule(Constant(0.5)))
    gamma, beta = norm.parameters(IMAGE)
    assert (gamma.initial, gamma.lr_mult, gamma.wd_mult) == (None, 0.1, 0)
    assert (beta.initial, beta.lr_mult, beta.wd_mult) == (Constant(0.5), 1, 0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Rule(lr_mult=-1), "lr_mult must be a number from 0"),
        (lambda: Rule(wd_mult=float("inf")), "wd_mult must be a number from 0"),
        (lambda: Rule(wd_mult=float("nan")), "wd_mult must be a number from 0"),
        (lambda: Xavier("gauss", "in"), "rnd_type must be gaussian or uniform, factor_type in, out or avg"),
        (lambda: Xavier("uniform", "both"), "rnd_type must be gaussian or uniform, factor_type in, out or avg"),
    ],
)
def test_impossible_rules_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
