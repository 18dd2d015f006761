"""The frameworks, each behind one small interface (backend.py). A new one is a package and a row of TABLE."""

from __future__ import annotations

from dmltrain.backends.backend import Backend, Capabilities, Settings, Trainer
from dmltrain.backends.mxnet.backend import MXNetBackend
from dmltrain.backends.torch.backend import TorchBackend

__all__ = ["TABLE", "Backend", "Capabilities", "Settings", "Trainer"]

TABLE: dict[str, Backend] = {backend.name: backend for backend in (TorchBackend(), MXNetBackend())}
