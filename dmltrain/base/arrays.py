"""The type of numpy arrays; comments and docstrings state shapes and element types."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

Array = NDArray[Any]
