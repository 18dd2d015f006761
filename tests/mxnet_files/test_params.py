"""MXNet's files of arrays: the same arrays as MXNet reads, and no others. MXNet crashes on some of these files."""

import struct

import numpy as np
import pytest

from dmltrain.mxnet_files import params
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
