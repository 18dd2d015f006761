"""Where MXNet 1.9.1 gets along with numpy 1.26 and Python 3.10/3.11, and with being imported at all.

MXNet 1.9.1 is of 2022 and will not change. Found by looking through its whole package, and by running it:

- `numpy.bool`, which numpy removed in 1.24: `mxnet/numpy/utils.py` and more; without it `import mxnet` fails.
- `numpy.int`: `mxnet/test_utils.py`, chi_square_check. `numpy.float`, `numpy.object`, `numpy.str` and `numpy.complex`,
  removed with them, are used by MXNet's examples and by its users' programs. `fit_numpy` gives all six back.
- numpy 2 has removed more, and changed what promotes to what (`mxnet/numpy/fallback.py`, `mxnet/numpy/utils.py`):
  not supported; the error names the fix.
- `distutils` (`mxnet/numpy_op_fallback.py`, `mxnet/numpy_dispatch_protocol.py`), which Python removed in 3.12: `load`
  refuses such a Python. On 3.10 and 3.11 it costs a DeprecationWarning at import, as numpy's financial functions do
  (`mxnet/numpy/fallback.py`): `load` keeps them to itself.
- `mxnet/kvstore/kvstore_server.py` serves, and then exits, inside `import mxnet` where DMLC_ROLE is server or
  scheduler. Programs that know nothing of dmltrain need that; `load` imports without it.
- `mxnet/libmxnet.so` needs libgomp and libquadmath, which slim images lack, and with mxnet-cu112 also CUDA 11.2's
  libraries: `load` says what to install.

dmltrain itself takes mxnet from `load` only. For every other program of the environment `dmltrain_mxnet.pth`, installed
beside the package, asks for `spec` when the program first looks for mxnet; until then it imports nothing. Their failing
workers end too: see `mxnet_exit`.
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
from dmltrain.errors import UserError

PYTHONS = ((3, 10), (3, 11))
VERSION = "1.9"
# removed in numpy 1.24
REMOVED = {"bool": bool, "int": int, "float": float, "complex": complex, "object": object, "str": str}
# library -> Debian's package
PACKAGES = {"libgomp": "libgomp1", "libquadmath": "libquadmath0", "libstdc++": "libstdc++6"}
CUDA = re.compile(r"lib(cu|nv|nccl)")  # CUDA's libraries, cuDNN, the driver's libcuda, NVRTC, NCCL

_LOCK = threading.RLock()


def load() -> ModuleType:
    """The module mxnet. In the server's and the scheduler's role too the import returns and serves nothing.

    May be called from any thread, and again. While the first call imports, DMLC_ROLE is not in the environment.
    UserError says what is missing: the Python version, MXNet, its numpy, or a library of the system.
    """
    with _LOCK:
        check_python(sys.version_info[:2])
        with _without_role(), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            mxnet = _import()
        if not mxnet.__version__.startswith(f"{VERSION}."):
            raise UserError(
                f"the mxnet backend is made for MXNet {VERSION}, and {mxnet.__version__} is installed in "
                f"{os.path.dirname(str(mxnet.__file__))}: pip install 'dmltrain[mxnet]'"
            )
        return mxnet


def check_python(version: tuple[int, int]) -> None:
    """UserError where MXNet cannot run."""
    if version not in PYTHONS:
        known = " or ".join(f"{major}.{minor}" for major, minor in PYTHONS)
        raise UserError(
            f"the mxnet backend needs Python {known}, and this is {version[0]}.{version[1]} "
            f"({sys.executable}): use --backend torch, or make an environment with such a Python"
        )


def _import() -> ModuleType:
    try:
        fit_numpy()
        return importlib.import_module("mxnet")
    except ModuleNotFoundError as error:
        if error.name == "mxnet":
            raise UserError(
                f"the mxnet backend needs MXNet, and {sys.executable} has none: "
                "pip install 'dmltrain[mxnet]' (CPU) or 'dmltrain[mxnet-cu112]' (CUDA 11.2)"
            ) from None
        raise UserError(f"MXNet needs the module {error.name}: pip install 'dmltrain[mxnet]'") from error
    except ImportError as error:
        raise UserError(str(error)) from error
    except OSError as error:
        raise UserError(missing_library(str(error))) from error


def fit_numpy() -> None:
    """Give numpy back the names that it removed in 1.24. Again does nothing. ImportError: this numpy is too new."""
    import numpy

    if int(numpy.__version__.split(".")[0]) > 1:
        raise ImportError(
            f"MXNet 1.9.1 works with numpy 1.x, and {numpy.__version__} is installed: "
            "pip install 'numpy<2' (1.26.4 is what dmltrain is tested with)"
        )
    for name, kind in REMOVED.items():
        vars(numpy).setdefault(name, kind)


def missing_library(message: str, packages: Mapping[str, str] = PACKAGES) -> str:
    """What to install, from what the dynamic loader said, `NAME.so.N: cannot open shared object file: ...`."""
    library = message.partition(":")[0]
    name = library.partition(".so")[0]
    if name in packages:
        return (
            f"MXNet needs the library {library}, which this machine lacks: apt-get install {packages[name]} "
            f"(as root; MXNet's wheel needs {', '.join(packages.values())})"
        )
    if CUDA.match(name):
        return (
            f"this MXNet is mxnet-cu112, which needs CUDA 11.2, and {library} is not found: put CUDA 11.2's "
            "libraries on LD_LIBRARY_PATH, or use the one without GPUs: pip uninstall mxnet-cu112, "
            "then pip install 'dmltrain[mxnet]'"
        )
    return f"MXNet's library cannot be loaded: {message}"


@contextlib.contextmanager
def _without_role() -> Iterator[None]:
    """The environment without what makes `import mxnet` serve."""
    role = os.environ.pop("DMLC_ROLE", None)
    try:
        yield
    finally:
        if role is not None:
            os.environ["DMLC_ROLE"] = role


class _Loader(SourceFileLoader):
    """What is done before mxnet's first line."""

    def exec_module(self, module: ModuleType) -> None:
        fit_numpy()
        mxnet_exit.watch()
        super().exec_module(module)


def spec() -> ModuleSpec | None:
    """How to import mxnet, for dmltrain_mxnet.pth; None where it is not installed. Looking alone changes nothing."""
    found = PathFinder.find_spec("mxnet")
    if found and type(found.loader) is SourceFileLoader:
        found.loader = _Loader(found.loader.name, found.loader.path)
    return found
