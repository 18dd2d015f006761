"""Where MXNet 1.9.1, numpy 1.26 and Python 3.10/3.11 are made to get along; everything else takes mxnet from `load()`.

Imports nothing but the standard library until it is asked to.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from types import ModuleType

from dmltrain.errors import UserError

_LOCK = threading.RLock()


def load() -> ModuleType:
    """The module mxnet, imported without starting a server inside the import, whatever DMLC_ROLE says."""
    with _LOCK:
        if sys.version_info[:2] not in ((3, 10), (3, 11)):
            raise UserError(f"the mxnet backend needs Python 3.10 or 3.11, and this is "
                            f"{sys.version_info.major}.{sys.version_info.minor}: use such a Python or --backend torch")
        fit_numpy()
        with _without_role(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                return importlib.import_module("mxnet")
            except ModuleNotFoundError as error:
                if error.name != "mxnet":
                    raise
                raise UserError("the mxnet backend needs MXNet 1.9.1, and it is not installed: "
                                "pip install 'dmltrain[mxnet]' (or 'dmltrain[mxnet-cu112]' for GPUs)") from None


def fit_numpy() -> None:
    """Gives numpy back the names that MXNet 1.9.1 uses. Idempotent."""
    import numpy

    for name, kind in {"bool": bool, "int": int, "float": float, "object": object}.items():
        if name not in vars(numpy):
            setattr(numpy, name, kind)


@contextlib.contextmanager
def _without_role() -> Iterator[None]:
    """DMLC_ROLE out of the environment: with a server's or the scheduler's, `import mxnet` serves and exits inside."""
    role = os.environ.pop("DMLC_ROLE", None)
    try:
        yield
    finally:
        if role is not None:
            os.environ["DMLC_ROLE"] = role
