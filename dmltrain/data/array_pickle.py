"""Reads an untrusted pickle: arrays, bytes and plain values, and nothing else.

Unpickling calls the functions that the pickle names. Here these are the few that arrays need; they run no code from the
pickle. All other names are rejected before they are looked up. The memory is limited too: there are at most MAX_STEPS
steps, and what they make has no more bytes than the pickle itself.
"""

import io
import pickle
import pickletools
from dataclasses import dataclass
from typing import Any

import numpy as np

from dmltrain.base.arrays import Array

MAX_STEPS = 200_000  # the batches of CIFAR-10 have about 30,000; each makes an object of 250 bytes at most
_STORES = ("PUT", "BINPUT", "LONG_BINPUT")  # each has a number, and the unpickler reserves memory for as many objects
_DTYPE_TEXT = 8  # characters of an element type such as <f8


def loads(data: bytes) -> Any:
    """The object in the pickle; strings of Python 2 become bytes, and arrays objects for np.asarray.

    Raises ValueError or pickle.UnpicklingError if the pickle names something else or takes too much memory.
    """
    for count, (step, argument, _) in enumerate(pickletools.genops(data)):
        if count >= MAX_STEPS:
            raise pickle.UnpicklingError(f"it has more than {MAX_STEPS} steps")
        if step.name in _STORES and int(argument or 0) > count:
            raise pickle.UnpicklingError(f"step {count} stores object number {argument}")
    return _ArrayUnpickler(data).load()


class _ArrayUnpickler(pickle.Unpickler):
    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data), encoding="bytes")
        self._left = len(data)  # bytes that may still be made
        self._allowed = {
            ("numpy.core.multiarray", "_reconstruct"): _Array,
            ("numpy._core.multiarray", "_reconstruct"): _Array,  # numpy 2
            ("numpy", "ndarray"): "ndarray",  # only an argument of _reconstruct
            ("numpy", "dtype"): _ElementType,
            ("_codecs", "encode"): self._latin1,
        }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._allowed:
            return self._allowed[module, name]
        raise pickle.UnpicklingError(f"it names {module}.{name}, which arrays do not need")

    def _latin1(self, text: str, encoding: str) -> bytes:
        """`_codecs.encode` as pickles of protocol 2 use it for bytes."""
        self._left -= len(text)
        if self._left < 0:
            raise pickle.UnpicklingError("it repeats texts")
        return text.encode("latin1")


class _ElementType:
    """np.dtype in a pickle: a simple type."""

    def __init__(self, text: str | bytes, *_: object) -> None:
        if not isinstance(text, (str, bytes)) or len(text) > _DTYPE_TEXT:
            raise pickle.UnpicklingError(f"an array's element type is {str(text)[:50]!r}, expected one such as 'u1'")
        self.dtype = np.dtype(text if isinstance(text, str) else text.decode("latin1"))
        if self.dtype.kind not in "biuf":
            raise pickle.UnpicklingError(f"an array of {self.dtype}, expected numbers")

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        order: Any = state[1] if isinstance(state[1], str) else state[1].decode("latin1")
        self.dtype = self.dtype.newbyteorder(order)


@dataclass(init=False)
class _Array:
    """numpy's function that creates an array, and the array, a view of the pickle's bytes."""

    array: Array | None = None

    def __init__(self, kind: object, shape: object, code: object) -> None:
        """The arguments are always ndarray, (0,) and b"b"; the state has the real ones."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, element, by_columns, content = state
        if not isinstance(element, _ElementType) or not isinstance(content, bytes):
            raise pickle.UnpicklingError("an array without numbers")
        self.array = np.frombuffer(content, element.dtype).reshape(shape, order="F" if by_columns else "C")

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        if self.array is None:
            raise ValueError("an array without content")
        return self.array.astype(dtype or self.array.dtype, copy=bool(copy))
