"""The table of backends. A new one is a package and a row here.

The table is not in the package's __init__, because that is imported by programs that only `import mxnet` (see
mxnet/compat); they may have no NumPy.
"""

from __future__ import annotations

from dmltrain.backends.backend import Backend
from dmltrain.backends.mxnet.backend import MXNetBackend
from dmltrain.backends.torch.backend import TorchBackend

BACKENDS: dict[str, Backend] = {backend.name: backend for backend in (TorchBackend(), MXNetBackend())}
