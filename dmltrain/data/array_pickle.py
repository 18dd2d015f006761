"""Reads an untrusted pickle: creates numpy arrays, bytes and plain values, and nothing else.

Unpickling calls the functions that the pickle names. Here these are the few that arrays need; they run no code from the
pickle. All other names are rejected before they are looked up.
"""

import io
import pickle
from typing import Any

import numpy as np


def loads(data: bytes) -> Any:
    """The object in the pickle; strings of Python 2 become bytes. pickle.UnpicklingError: it names something else."""
    return _ArrayUnpickler(io.BytesIO(data), encoding="bytes").load()


class _ArrayUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in ALLOWED:
            return ALLOWED[module, name]
        raise pickle.UnpicklingError(f"it names {module}.{name}, which arrays do not need")


def _latin1(text: str, encoding: str) -> bytes:
    """`_codecs.encode` as pickles of protocol 2 use it for bytes."""
    return text.encode("latin1")


# The function that creates arrays, wherever this version of numpy has it.
_RECONSTRUCT = np.empty(0).__reduce__()[0]
ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,  # numpy 2
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): _latin1,
}
