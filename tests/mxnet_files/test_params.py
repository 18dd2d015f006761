"""MXNet's files of arrays: the same arrays as MXNet reads, and no others. MXNet crashes on some of these files."""

import pickle
import struct
from pathlib import Path

import numpy as np
import pytest

from dmltrain.base.errors import UserError
from dmltrain.layers import BatchNorm, Conv, Dense, Flatten, Network, chain
from dmltrain.mxnet_files import params, weights
from tests.archives import refused

V1, V2, V3 = 0xF993FAC8, 0xF993FAC9, 0xF993FACA
FLOATS = np.arange(6, dtype=np.float32).tobytes()


def file(*arrays, names=(b"arg:a",), count=None, start=0x112):
    """A file of arrays, each in bytes."""
    packed = b"".join(struct.pack("<Q", len(name)) + name for name in names)
    head = struct.pack("<QQQ", start, 0, len(arrays) if count is None else count)
    return head + b"".join(arrays) + struct.pack("<Q", len(names)) + packed


def array(version, shape=(2, 3), kind=0, data=FLOATS, storage=0, dimensions=None):
    if dimensions is None:
        dimensions = len(shape)
    head = struct.pack("<I", version) + (struct.pack("<i", storage) if version != V1 else b"")
    return head + struct.pack(f"<I{len(shape)}qiii", dimensions, *shape, 1, 0, kind) + data


def oldest(shape=(2, 3), data=FLOATS):
    """An array of MXNet before 0.11."""
    return struct.pack(f"<I{len(shape)}Iiii", len(shape), *shape, 1, 0, 0) + data


def test_every_type_that_mxnet_saves_is_read(mx, tmp_path):
    dtypes = ("float32", "float64", "float16", "uint8", "int32", "int8", "int64")
    saved = {f"arg:{dtype}": mx.nd.array([[0, 1, 2], [3, 4, 5]], dtype=dtype) for dtype in dtypes}
    saved["aux:one"] = mx.nd.ones((1,))
    mx.nd.save(str(tmp_path / "p"), saved)
    found = params.read((tmp_path / "p").read_bytes())
    assert list(found) == list(saved)
    for name, each in saved.items():
        assert found[name].dtype == each.dtype and np.array_equal(found[name], each.asnumpy())
        assert found[name].flags.writeable


@pytest.mark.parametrize("content", [file(array(V1)), file(array(V2)), file(oldest())], ids=["1", "2", "oldest"])
def test_older_files_are_read_as_mxnet_reads_them(mx, content):
    found, expected = params.read(content), mx.nd.load_frombuffer(content)
    assert list(found) == list(expected) == ["arg:a"]
    assert found["arg:a"].tolist() == expected["arg:a"].asnumpy().tolist() == [[0, 1, 2], [3, 4, 5]]


def test_an_array_without_dimensions_and_what_follows_the_names():
    content = file(array(V3, (), data=FLOATS[4:8]), array(V3), names=(b"a", b"b")) + b"more"
    assert params.read(content)["a"].shape == () and params.read(content)["a"] == 1.0
    assert params.read(content)["b"].shape == (2, 3)
    assert params.read(file(names=())) == {}


BAD = {
    "empty": (b"", "16 bytes expected at byte 0 of 0"),
    "another file": (b"PK" * 50, "it does not start as a file of arrays"),
    "arrays": (file(array(V2), count=1 << 62), "4611686018427387904 arrays or names expected at byte 24"),
    "elements": (file(array(V2, (1 << 40, 2))), "8796093022208 bytes expected at byte"),
    "negative": (file(array(V2, (-2, -3))), r"array of shape \(-2, -3\) and type 0"),
    "type": (file(array(V2, kind=12)), "and type 12"),
    "negative type": (file(array(V2, kind=-1)), "and type -1"),
    "dimensions": (file(array(V2, dimensions=33)), "an array of 33 dimensions"),
    "no shape": (file(array(V2, ())), "an array of 0 dimensions"),
    "unknown version": (file(array(0x7F000000)), "an array of 2130706432 dimensions"),
    "sparse": (file(array(V2, storage=1)), "it has a sparse array"),
    "name": (file(array(V2))[:-1], "5 bytes expected at byte"),
    "no UTF-8": (file(array(V2), names=(b"\xff",)), "can't decode byte"),
    "one name": (file(array(V2), array(V2)), "2 arrays have 1 names"),
    "no name": (file(array(V2), names=()), "its arrays have no names"),
}


@pytest.mark.parametrize("case", BAD)
def test_everything_else_is_refused_before_it_takes_memory(case):
    refused(params.read, *BAD[case], memory=1 << 20)


# -- weights: matched by name, and refused with the arrays that do not fit --------------------------------------------


ROOT = chain(Conv("conv", 2), BatchNorm("fixed"), BatchNorm("free", fixed_scale=False), Flatten(), Dense("fc", 3))
NETWORK = Network("net", ROOT, (1, 2, 2), 3)
SOURCE = Path("runs/old-0010.params")


def arrays(network=NETWORK):
    draw = np.random.default_rng(0)
    return {each.name: draw.standard_normal(each.shape) for each in (*network.parameters(), *network.auxiliary())}


def test_the_gammas_of_fixed_scales_are_ignored_whatever_they_hold():
    """MXNet computes with ones, whatever the file says: src/operator/nn/batch_norm-inl.h, fix_gamma."""
    assert [(fixed_gamma.name, fixed_gamma.shape) for fixed_gamma in weights.fixed_gammas(NETWORK)] == [
        ("fixed_gamma", (2,))
    ]
    own = arrays()
    for values in (np.ones(2), np.full(2, 7.0)):
        found = weights.fitting(SOURCE, {"fixed_gamma": values, **own}, NETWORK)
        assert list(found) == list(own)


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_every_type_becomes_float32(dtype):
    own = {name: array.astype(dtype) for name, array in arrays().items()}
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
