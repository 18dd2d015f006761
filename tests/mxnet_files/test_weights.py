"""Weights of MXNet's files: matched by name, and refused with the arrays that do not fit."""

import pickle
from pathlib import Path

import numpy as np
import pytest

from dmltrain.errors import UserError
from dmltrain.layers import BatchNorm, Conv, Dense, Flatten, Network, chain
from dmltrain.mxnet_files import weights
from tests.mxnet_files.test_params import V2, array, file

ROOT = chain(Conv("conv", 2), BatchNorm("fixed"), BatchNorm("free", fixed_scale=False), Flatten(), Dense("fc", 3))
NETWORK = Network("net", ROOT, (1, 2, 2), 3)
SOURCE = Path("runs/old-0010.params")


def arrays(network=NETWORK):
    draw = np.random.default_rng(0)
    return {each.name: draw.standard_normal(each.shape) for each in (*network.parameters(), *network.auxiliary())}


def test_the_gammas_of_fixed_scales_are_ignored_whatever_they_hold():
    """MXNet computes with ones, whatever the file says: src/operator/nn/batch_norm-inl.h, fix_gamma."""
    assert [(each.name, each.shape) for each in weights.fixed_gammas(NETWORK)] == [("fixed_gamma", (2,))]
    own = arrays()
    for values in (np.ones(2), np.full(2, 7.0)):
        found = weights.fitting(SOURCE, {"fixed_gamma": values, **own}, NETWORK)
        assert list(found) == list(own)


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_every_type_becomes_float32(dtype):
    own = {name: each.astype(dtype) for name, each in arrays().items()}
    for name, found in weights.fitting(SOURCE, own, NETWORK).items():
        assert found.dtype == np.float32 and np.array_equal(found, own[name].astype(np.float32))


def test_what_does_not_fit_is_named_with_the_options_that_may_be_wrong():
    found = arrays() | {"fc_weight": np.ones((10, 8)), "fc_bias": np.ones(()), "other_weight": np.ones(1)}
    del found["conv_bias"]
    with pytest.raises(UserError) as caught:
        weights.fitting(SOURCE, found, NETWORK)
    shapes = "2 arrays are of another shape: fc_weight (expected 3x8, found 10x8), fc_bias (expected 3, found a number)"
    facts = (f"in {SOURCE} ", "than net: ", "1 array is missing: conv_bias", shapes, "other_weight.")
    for fact in (*facts, "--num-layers", "--network runs/old-symbol.json"):
        assert fact in str(caught.value)
    with pytest.raises(UserError, match="11 .*: conv_weight, conv_bias, fixed_beta, free_gamma and 7 more[.]"):
        weights.fitting(SOURCE, {}, NETWORK)


def test_kinds_are_removed_and_names_stay_unique():
    assert set(weights.read(SOURCE, file(array(V2), array(V2), names=(b"arg:a", b"aux:b")))) == {"a", "b"}
    assert set(weights.read(SOURCE, file(array(V2), names=(b"arg:aux:a",)))) == {"aux:a"}
    with pytest.raises(UserError, match="two arrays of the name a"):
        weights.read(SOURCE, file(array(V2), array(V2), names=(b"arg:a", b"a")))


def test_files_that_hold_no_named_weights_are_refused(tmp_path):
    (tmp_path / "noise").write_bytes(b"noise" * 100)
    (tmp_path / "list").write_bytes(file(array(V2), names=()))
    (tmp_path / "pickle").write_bytes(pickle.dumps({"arg:fc_weight": np.zeros(3)}))
    start = "does not start as"
    for name, fact in {"noise": start, "list": "no names", "pickle": start, "missing": "No such file"}.items():
        with pytest.raises(UserError, match=f"{name}: .*{fact}"):
            weights.read(tmp_path / name)
