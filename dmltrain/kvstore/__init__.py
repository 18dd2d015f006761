"""The key-value store through which workers exchange gradients and weights. Its interface follows MXNet's KVStore.

The training loop uses only `create` (dmltrain/api/create.py) and the methods of `KVStore` (base.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dmltrain.kvstore.base import READ, Handle, KVStore
from dmltrain.kvstore.types import TYPES

if TYPE_CHECKING:
    from dmltrain.api.create import create as create
    from dmltrain.api.create import serve as serve
    from dmltrain.api.create import serve_and_exit as serve_and_exit

__all__ = ["READ", "TYPES", "Handle", "KVStore", "create", "serve", "serve_and_exit"]


def __getattr__(name: str) -> Any:
    """`create`, `serve` and `serve_and_exit` need the backends, which are above this package in the order of imports.
    So they are imported when they are first used."""
    if name not in ("create", "serve", "serve_and_exit"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from dmltrain.api import create

    return getattr(create, name)
