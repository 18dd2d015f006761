"""First weights: their distribution, what they depend on, and that they are the same numbers everywhere."""

from statistics import NormalDist

import numpy as np
import pytest

from dmltrain import initial, models
from dmltrain.errors import UserError
from dmltrain.layers import Conv, Dense, Flatten, Network, chain


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
    chances = np.concatenate(
        [
            np.random.RandomState(0).rand(2000),
            [2.0**-53, 1e-12, 1.4e-11, 1.3e-11, 0.0749, 0.0751, 0.5, 0.9251, 1 - 1e-12],  # where the formulas change
        ]
    )
    expected = np.array([NormalDist().inv_cdf(chance) for chance in chances])
    assert np.allclose(initial.normal_quantile(chances), expected, rtol=2e-7, atol=1e-9)


def test_same_numbers_on_every_machine():
    """Exact, because every operation on the way is exact or rounded as IEEE 754 prescribes."""
    root = chain(Conv("conv", 2, kernel=2, bias=False), Flatten(), Dense("fc", 1))
    arrays = initial.first_values(Network("n", root, (1, 3, 3), 1), 42)
    assert [float(each).hex() for each in arrays["conv_weight"].ravel()] == GOLDEN
    far = initial.normal_quantile(np.array([2.0**-53, 1e-9, 0.01, 0.3]))
    assert [each.hex() for each in far.tolist()] == GOLDEN_QUANTILES


GOLDEN = [
    "-0x1.654b2c0000000p-3",
    "0x1.34ac680000000p-2",
    "-0x1.7859960000000p-1",
    "0x1.4139f20000000p-2",
    "-0x1.434ca40000000p-3",
    "0x1.73a8c00000000p-1",
    "-0x1.1ce33e0000000p-1",
    "-0x1.1e098a0000000p-1",
]
GOLDEN_QUANTILES = [
    "-0x1.06b485687b3ebp+3",
    "-0x1.7fdc0f0aa6423p+2",
    "-0x1.29c5c5af04ce2p+1",
    "-0x1.0c7e39ce2490dp-1",
]


def test_depends_on_the_seed_and_nothing_else():
    network = models.create("lenet")
    one, same, other = (initial.first_values(network, seed) for seed in (5, 5, 6))
    for each in network.parameters():
        assert np.array_equal(one[each.name], same[each.name])
        assert np.array_equal(one[each.name], other[each.name]) == (each.kind == "bias")


def test_negative_seed_is_refused():
    with pytest.raises(UserError, match="the seed is -1"):
        initial.first_values(models.create("mlp"), -1)
