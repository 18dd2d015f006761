"""First weights: their distribution, what they depend on, and that they are the same numbers everywhere."""

from statistics import NormalDist

import numpy as np
import pytest

from dmltrain import initial, models
from dmltrain.base.errors import UserError
from dmltrain.layers import (
    INITIALISERS,
    Constant,
    Conv,
    Dense,
    Dirac,
    Exactly,
    Flatten,
    Initialiser,
    Network,
    Normal,
    Rule,
    Xavier,
    chain,
)


def test_the_distribution_is_mxnets():
    network = models.create("inception-bn-28-small")
    arrays = initial.first_values(network, 0)
    assert list(arrays) == [each.name for each in (*network.parameters(), *network.auxiliary())]
    for each in (*network.parameters(), *network.auxiliary()):
        values = arrays[each.name]
        assert values.shape == each.shape and values.dtype == np.float32
        if each.kind == "weight":
            scaled = values.astype("f8") * (values[0].size / 2) ** 0.5  # fan-in / 2: standard normal
            assert scaled.mean() == pytest.approx(0, abs=5 / each.size**0.5), each.name
            assert scaled.var() == pytest.approx(1, abs=5 * (2 / each.size) ** 0.5), each.name
        else:
            assert (values == (1 if each.kind in ("gamma", "moving_var") else 0)).all(), each.name


def test_values_are_normal_and_not_correlated():
    network = Network("n", chain(Flatten(), Dense("fc", 500)), (2, 10, 20), 500)
    values = initial.first_values(network, 3)["fc_weight"].ravel().astype("f8") * 200**0.5
    below = np.searchsorted(np.sort(values), (-3, -2, -1, 0, 1, 2, 3)) / values.size
    expected = [NormalDist().cdf(x) for x in (-3, -2, -1, 0, 1, 2, 3)]
    assert np.allclose(below, expected, atol=5 * 0.5 / values.size**0.5)
    assert np.abs(values).max() == pytest.approx(4.7, abs=0.9)  # of 200,000
    for apart in (1, 2, 400, initial.CHUNK):
        assert np.mean(values[apart:] * values[:-apart]) == pytest.approx(0, abs=5 / (values.size - apart) ** 0.5)


def test_quantiles_are_pythons():
    changes = [2.0**-53, 1e-12, 1.4e-11, 1.3e-11, 0.0749, 0.0751, 0.5, 0.9251, 1 - 1e-12]  # of the formulas
    chances = np.concatenate([np.random.RandomState(0).rand(2000), changes])
    expected = np.array([NormalDist().inv_cdf(chance) for chance in chances])
    assert np.allclose(initial.normal_quantile(chances), expected, rtol=2e-7, atol=1e-9)


def test_same_numbers_on_every_machine():
    """Exact, because every operation on the way is exact or rounded as IEEE 754 prescribes."""
    root = chain(Conv("conv", 2, kernel=2, bias=False), Flatten(), Dense("fc", 1))
    arrays = initial.first_values(Network("n", root, (1, 3, 3), 1), 42)
    assert " ".join(float(each).hex() for each in arrays["conv_weight"].ravel()) == GOLDEN
    far = initial.normal_quantile(np.array([2.0**-53, 1e-9, 0.01, 0.3]))
    assert " ".join(each.hex() for each in far.tolist()) == GOLDEN_QUANTILES


GOLDEN = (
    "-0x1.654b2c0000000p-3 0x1.34ac680000000p-2 -0x1.7859960000000p-1 0x1.4139f20000000p-2 "
    "-0x1.434ca40000000p-3 0x1.73a8c00000000p-1 -0x1.1ce33e0000000p-1 -0x1.1e098a0000000p-1"
)
GOLDEN_QUANTILES = "-0x1.06b485687b3ebp+3 -0x1.7fdc0f0aa6423p+2 -0x1.29c5c5af04ce2p+1 -0x1.0c7e39ce2490dp-1"


def test_depends_on_the_seed_and_nothing_else_and_a_negative_seed_is_refused():
    network = models.create("lenet")
    one, same, other = (initial.first_values(network, seed) for seed in (5, 5, 6))
    for parameter in network.parameters():
        assert np.array_equal(one[parameter.name], same[parameter.name])
        assert np.array_equal(one[parameter.name], other[parameter.name]) == (parameter.kind == "bias")
    with pytest.raises(UserError, match="the seed is -1"):
        initial.first_values(models.create("mlp"), -1)


def one_array(initialiser, seed=0):
    """(300, 40, 3, 3)"""
    root = chain(Conv("conv", 300, kernel=3, bias=False), Flatten(), Dense("fc", 1))
    network = Network("n", root, (40, 3, 3), 1, initialiser)
    return initial.first_values(network, seed)["conv_weight"].astype("f8")


@pytest.mark.parametrize("factor, n", [("in", 40 * 9), ("out", 300 * 9), ("avg", 170 * 9)])
@pytest.mark.parametrize("kind", ["gaussian", "uniform"])
def test_kinds_of_xavier(kind, factor, n):
    values = one_array(Xavier(kind, factor, 2.5))
    scale = (2.5 / n) ** 0.5
    assert values.std() == pytest.approx(scale if kind == "gaussian" else scale / 3**0.5, rel=0.02)
    largest = np.abs(values).max()
    assert largest > 4 * scale if kind == "gaussian" else largest == pytest.approx(scale, rel=1e-3)


@pytest.mark.parametrize("shape", [(300, 40, 3, 3), (500, 20)])
def test_rows_or_columns_of_orthogonal_weights_are_orthogonal(shape):
    first = [Conv("conv", 300, kernel=3, bias=False)] if len(shape) == 4 else []
    root, image = chain(*first, Flatten(), Dense("fc", 500)), (40, 3, 3) if first else (20, 1, 1)
    network = Network("n", root, image, 500, INITIALISERS["orthogonal"])
    matrix = initial.first_values(network, 1)["conv_weight" if first else "fc_weight"]
    assert matrix.shape == shape
    matrix = matrix.reshape(shape[0], -1).astype("f8")
    products = matrix @ matrix.T if shape[0] < matrix.shape[1] else matrix.T @ matrix
    assert np.allclose(products, 1.414**2 * np.eye(len(products)), atol=1e-5)


def test_the_first_filters_pass_channels_on_and_the_others_are_as_the_rest():
    found, rest = one_array(Dirac(Xavier())), one_array(Xavier())
    images = np.random.RandomState(0).rand(40, 3, 3)
    assert np.array_equal(np.tensordot(found[:40], images, 3), images[:, 1, 1])
    assert np.array_equal(found[40:], rest[40:])


def test_layers_have_rules_of_their_own():
    """Which do not move the random numbers of the arrays after them, unless they draw some."""
    rules = {"weight_rule": Rule(Constant(0.5)), "bias_rule": Rule(Exactly((1.0, 2.0, 3.0)))}

    def made(**rules):
        root = chain(Flatten(), Dense("first", 3, **rules), Dense("second", 4))
        return initial.first_values(Network("n", root, (1, 2, 2), 4, Normal(0.2)), 0)

    found, usual = made(**rules), made()
    assert (found["first_weight"] == 0.5).all() and found["first_bias"].tolist() == [1, 2, 3]
    assert usual["first_weight"].std() > 0.1 and (usual["first_bias"] == 0).all()
    assert found["second_weight"].tolist() == usual["first_weight"].ravel()[:12].reshape(4, 3).tolist()


def test_an_initialiser_without_numbers_is_named():
    with pytest.raises(NotImplementedError, match=r"no numbers for Initialiser\(\)"):
        one_array(Initialiser())


THEIRS = {"xavier": "Xavier", "msra": "MSRAPrelu", "orthogonal": "Orthogonal", "normal": "Normal"}
THEIRS |= {"uniform": "Uniform", "one": "One", "zero": "Zero"}


@pytest.mark.parametrize("name, theirs", THEIRS.items())
def test_names_mean_what_they_mean_in_mxnet(mx, name, theirs):
    mx.random.seed(1)
    array = mx.nd.zeros((300, 40, 3, 3))
    getattr(mx.init, theirs)()(mx.init.InitDesc("conv_weight"), array)
    expected, found = array.asnumpy().astype("f8"), one_array(INITIALISERS[name])
    assert found.mean() == pytest.approx(expected.mean(), abs=0.02 * np.abs(expected).max())
    for power in (2, 4):  # of 108,000 values
        assert (found**power).mean() == pytest.approx((expected**power).mean(), rel=0.05)


def test_every_name_of_mxnets_programs_is_known():
    assert list(INITIALISERS) == ["default", *THEIRS]
