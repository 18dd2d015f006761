"""The type of numpy arrays; their shapes and element types are in comments and docstrings."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

Array = NDArray[Any]
