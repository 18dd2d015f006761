"""Arrays of any writer are loaded; everything that a pickle could execute is refused."""

import pickle

import numpy as np
import pytest

from dmltrain.data import array_pickle
from tests.archives import little_memory


@pytest.mark.parametrize(
    "value",
    [
        {b"data": np.arange(12, dtype=np.uint8).reshape(3, 4), b"labels": [1, 2], b"names": (b"a", "b", None, 1.5)},
        np.array([1.5, -2.0], dtype=">f8"),
    ],
)
def test_arrays_and_plain_values(value):
    read = array_pickle.loads(pickle.dumps(value, protocol=2))
    if isinstance(value, dict):
        assert np.array_equal(read.pop(b"data"), value[b"data"])
        assert read == {b"labels": [1, 2], b"names": (b"a", "b", None, 1.5)}
    else:
        assert np.asarray(read).tolist() == value.tolist()


@pytest.mark.parametrize(
    "text",
    [
        b"cos\nsystem\n(S'false'\ntR.",
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"c__builtin__\ngetattr\n.",
        b"cnumpy\nload\n.",
        b"cnumpy.core.multiarray\nfromfile\n.",
        b"(S'false'\nios\nsystem\n.",
        b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
        b"\x80\x04\x8c\x05numpy\x8c\x0dndarray.dumps\x93.",
        b"\x82\x01.",
    ],
    ids=str,
)
def test_everything_else_is_refused(text):
    with pytest.raises((pickle.UnpicklingError, ValueError)):
        array_pickle.loads(text)


def _array(shape=b"K\x00\x85", kind=b"U\x02u1", content=b"U\x02ab"):
    """A pickle of an array of two bytes, or of what the arguments say."""
    return (
        b"\x80\x02cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n" + shape + b"U\x01b\x87R(K\x01K\x02\x85"
        b"cnumpy\ndtype\n" + kind + b"K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        b"\x89" + content + b"tb."
    )


HUGE = b"J\xff\xff\xff\x3f"  # 2 ** 30 - 1


def test_the_array_of_python_2():
    assert bytes(np.asarray(array_pickle.loads(_array()))) == b"ab"
    empty = b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85U\x01btR."
    with pytest.raises(ValueError, match="without content"):
        np.asarray(array_pickle.loads(empty))


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02Nr\xff\xff\xff\x0f.",  # stores an object under a large number: room for 2 ** 29 objects
        b"\x80\x02Np268435455\n.",
        b"\x80\x02cnumpy\nndarray\n" + HUGE + b"\x85R.",  # numpy.ndarray(2 ** 30 - 1)
        b"\x80\x02" + b"]" * 300_000 + b".",
        _array(kind=b"U\x02O8"),
        _array(kind=b"U\x09" + b"u1,u1,u1,"),
        _array(kind=b"]"),
        _array(content=b"U\x03abc"),
        _array(content=b"]"),
        b"\x80\x02c_codecs\nencode\nq\x00X\x64\0\0\0"
        + b"a" * 100
        + b"q\x01U\x06latin1q\x02\x86R"
        + 5 * b"h\x00h\x01h\x02\x86R"
        + b".",
    ],
    ids=["number", "number in text", "ndarray", "steps", "objects", "long type", "type", "size", "list", "texts"],
)
def test_memory_is_limited(data):
    with little_memory(4 << 20), pytest.raises((pickle.UnpicklingError, ValueError, TypeError)):
        array_pickle.loads(data)
