"""Makes MXNet 1.9.1 work with numpy 1.26 and Python 3.10 and 3.11, and importable in every role.

MXNet 1.9.1 is from 2022 and will not change. A search of the whole package, and running it, found these problems:

- `import mxnet` needs `numpy.bool` (`mxnet/numpy/utils.py` and others), which numpy removed in 1.24.
- `mxnet/test_utils.py` (chi_square_check) uses `numpy.int`. MXNet's examples and users' programs use `numpy.float`,
  `numpy.object`, `numpy.str` and `numpy.complex`, also removed in 1.24. `fit_numpy` restores all six names.
- numpy 2 removed more names and changed type promotion (`mxnet/numpy/fallback.py`, `mxnet/numpy/utils.py`). It is not
  supported; the error states the fix.
- Python 3.12 removed `distutils` (`mxnet/numpy_op_fallback.py`, `mxnet/numpy_dispatch_protocol.py`); `load` rejects
  such a Python. On 3.10 and 3.11 `distutils` and numpy's financial functions (`mxnet/numpy/fallback.py`) cause
  DeprecationWarnings at import, which `load` suppresses.
- If DMLC_ROLE is server or scheduler, `mxnet/kvstore/kvstore_server.py` serves and then exits inside `import mxnet`.
  Programs without dmltrain need that; `load` imports without it.
- `mxnet/libmxnet.so` needs libgomp and libquadmath, which slim images lack; mxnet-cu112 also needs CUDA 11.2's
  libraries. `load` says what to install.

dmltrain itself imports mxnet by `load` only. For all other programs of the Python environment, the installed file
`dmltrain_mxnet.pth` calls `spec` when a program first looks for mxnet; until then it imports nothing. Failing workers
of such programs end, too: see exit.py.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType

from dmltrain.backends.mxnet.compat import exit as mxnet_exit
from dmltrain.base.errors import UserError

PYTHONS = ((3, 10), (3, 11))
VERSION = "1.9"
# removed in numpy 1.24
REMOVED = {"bool": bool, "int": int, "float": float, "complex": complex, "object": object, "str": str}
# library -> Debian's package
PACKAGES = {"libgomp": "libgomp1", "libquadmath": "libquadmath0", "libstdc++": "libstdc++6"}
CUDA = re.compile(r"lib(cu|nv|nccl)")  # CUDA's libraries, cuDNN, the driver's libcuda, NVRTC, NCCL

_LOCK = threading.RLock()


def load() -> ModuleType:
    """The module mxnet. The import returns without serving, also in the roles server and scheduler.

    Any thread may call this, repeatedly. During the first import DMLC_ROLE is not in the environment. UserError says
    what is missing: a supported Python, MXNet, its numpy, or a system library.
    """
    with _LOCK:
        check_python(sys.version_info[:2])
        with _without_role(), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            mxnet = _import()
        if not mxnet.__version__.startswith(f"{VERSION}."):
            raise UserError(
                f"the mxnet backend needs MXNet {VERSION}, but {mxnet.__version__} is installed in "
                f"{os.path.dirname(str(mxnet.__file__))}: pip install 'dmltrain[mxnet]'"
            )
        return mxnet


def check_python(version: tuple[int, int]) -> None:
    """Raise UserError if MXNet does not support this Python version."""
    if version not in PYTHONS:
        known = " or ".join(f"{major}.{minor}" for major, minor in PYTHONS)
        raise UserError(
            f"the mxnet backend needs Python {known}, but this is {version[0]}.{version[1]} ({sys.executable}): use "
            "--backend torch, or create an environment with such a Python"
        )


def _import() -> ModuleType:
    try:
        fit_numpy()
        return importlib.import_module("mxnet")
    except ModuleNotFoundError as error:
        if error.name == "mxnet":
            raise UserError(
                f"the mxnet backend needs MXNet, which {sys.executable} does not have: "
                "pip install 'dmltrain[mxnet]' (CPU) or 'dmltrain[mxnet-cu112]' (CUDA 11.2)"
            ) from None
        raise UserError(f"MXNet needs the module {error.name}: pip install 'dmltrain[mxnet]'") from error
    except ImportError as error:
        raise UserError(str(error)) from error
    except OSError as error:
        raise UserError(missing_library(str(error))) from error


def fit_numpy() -> None:
    """Restore the names that numpy removed in 1.24. Further calls do nothing. ImportError: this numpy is too new."""
    import numpy

    if int(numpy.__version__.split(".")[0]) > 1:
        raise ImportError(
            f"MXNet 1.9.1 needs numpy 1.x, but {numpy.__version__} is installed: "
            "pip install 'numpy<2' (1.26.4 is what dmltrain is tested with)"
        )
    for name, kind in REMOVED.items():
        vars(numpy).setdefault(name, kind)


def missing_library(message: str, packages: Mapping[str, str] = PACKAGES) -> str:
    """What to install for an error of the dynamic loader, `NAME.so.N: cannot open shared object file: ...`."""
    library = message.partition(":")[0]
    name = library.partition(".so")[0]
    if name in packages:
        return (
            f"MXNet needs the library {library}, which this machine lacks: apt-get install {packages[name]} "
            f"(as root; MXNet's wheel needs {', '.join(packages.values())})"
        )
    if CUDA.match(name):
        return (
            f"this MXNet is mxnet-cu112, which needs CUDA 11.2, but {library} was not found: put CUDA 11.2's libraries "
            "on LD_LIBRARY_PATH, or use MXNet without GPUs: pip uninstall mxnet-cu112, then pip install "
            "'dmltrain[mxnet]'"
        )
    return f"MXNet's library cannot be loaded: {message}"


@contextlib.contextmanager
def _without_role() -> Iterator[None]:
    """Remove DMLC_ROLE, which makes `import mxnet` serve, from the environment."""
    role = os.environ.pop("DMLC_ROLE", None)
    try:
        yield
    finally:
        if role is not None:
            os.environ["DMLC_ROLE"] = role


class _Loader(SourceFileLoader):
    """Prepares numpy and the exit before it runs mxnet's code."""

    def exec_module(self, module: ModuleType) -> None:
        fit_numpy()
        mxnet_exit.watch()
        super().exec_module(module)


def spec() -> ModuleSpec | None:
    """The import spec of mxnet, for dmltrain_mxnet.pth; None if it is not installed. The call has no side effects."""
    module_spec = PathFinder.find_spec("mxnet")
    if module_spec and type(module_spec.loader) is SourceFileLoader:
        module_spec.loader = _Loader(module_spec.loader.name, module_spec.loader.path)
    return module_spec
