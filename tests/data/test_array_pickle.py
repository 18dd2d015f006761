"""Arrays of any writer are loaded; everything that a pickle could execute is refused."""

import pickle

import numpy as np
import pytest

from dmltrain.data import array_pickle


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
        assert read.tolist() == value.tolist()


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
