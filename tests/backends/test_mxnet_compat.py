"""MXNet with NumPy 1.26, in a server's role, from threads, with missing dependencies, and how programs exit
with it: in new processes."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dmltrain.backends.mxnet import compat as mxnet_compat
from dmltrain.base.errors import UserError

ROOT = Path(__file__).parents[2]
PTH = ROOT / "dmltrain/backends/mxnet/dmltrain_mxnet.pth"
LOAD = "from dmltrain.backends.mxnet import compat\ncompat.load()"
# what an installed .pth does, in whichever interpreter runs the tests
WITH_PTH = f"import site\nexec(open({str(PTH)!r}).read())\n"

without_mxnet = importlib.util.find_spec("mxnet") is None
installed = pytest.mark.skipif(without_mxnet, reason="mxnet is not installed: pip install 'dmltrain[mxnet]'")
pythons = pytest.mark.skipif(
    sys.version_info[:2] not in mxnet_compat.PYTHONS,
    reason="MXNet runs on Python 3.10 and 3.11, and so this is refused before anything else",
)


def python(program: str, folder: Path | None = None, **environment: str) -> subprocess.CompletedProcess:
    """Runs `program`; modules in `folder` go before installed ones."""
    path = os.pathsep.join(str(each) for each in (folder, ROOT) if each)
    known = {name: value for name, value in os.environ.items() if not name.startswith("DMLC_")}
    environment = {**known, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)


def stand_in(folder: Path, name: str, text: str) -> Path:
    """A package of that name that stands in for the real one."""
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(text)
    return folder


def refusal(folder: Path | None) -> str:
    program = (
        f"from dmltrain.base.errors import UserError\ntry:\n    {LOAD.replace(chr(10), chr(10) + '    ')}\n"
        "except UserError as error:\n    print(error)"
    )
    done = python(program, folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


@installed
def test_loading_in_the_servers_role_from_many_threads_serves_nothing_and_warns_of_nothing():
    program = f"""
import os, sys, threading
from dmltrain.backends.mxnet import compat as mxnet_compat
found = []
threads = [threading.Thread(target=lambda: found.append(mxnet_compat.load())) for _ in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert len(found) == 4 and len(set(map(id, found))) == 1, found
assert os.environ["DMLC_ROLE"] == "server"
import numpy
assert found[0].nd.ones((2,)).asnumpy().astype(numpy.int).sum() == 2
assert (numpy.bool, numpy.int, numpy.float, numpy.object) == (bool, int, float, object)
assert {str(ROOT)!r} in mxnet_compat.__file__
"""
    done = python(program, DMLC_ROLE="server", PYTHONWARNINGS="always::DeprecationWarning")
    assert done.returncode == 0, done.stderr
    assert "Deprecat" not in done.stderr


@pytest.mark.thorough
@installed
def test_mxnet_before_torch_in_one_process():
    """Every test that compares the two has the other order."""
    pytest.importorskip("torch")
    program = "import mxnet, torch\nprint((mxnet.nd.ones((2, 2)).asnumpy() + torch.ones(2, 2).numpy()).sum())"
    done = python(f"{LOAD}\n{program}")
    assert (done.returncode, done.stdout) == (0, "8.0\n"), done.stderr


@installed
def test_the_pth_makes_mxnet_importable_and_does_nothing_before():
    program = f"""{WITH_PTH}
import importlib.util, sys
before = set(sys.modules)
import json, unittest
assert not {{"numpy", "dmltrain", "mxnet"}} & set(sys.modules) - before
assert importlib.util.find_spec("mxnet").name == "mxnet" and "numpy" not in set(sys.modules) - before
import mxnet
print(mxnet.nd.ones((2,)).asnumpy().sum())
"""
    done = python(program)
    assert (done.returncode, done.stdout) == (0, "2.0\n"), done.stderr


def test_without_mxnet_the_pth_changes_nothing(tmp_path):
    path = "sys.path[:] = [each for each in sys.path if 'site-packages' not in each]"
    done = python(f"import sys\n{path}\n{WITH_PTH}\nimport mxnet")
    assert done.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'mxnet'", done.stderr


@pytest.mark.parametrize("version", [(3, 9), (3, 12), (3, 14)])
def test_another_python(version):
    with pytest.raises(UserError, match=rf"3\.11, but this is 3\.{version[1]} .*--backend torch"):
        mxnet_compat.check_python(version)


ABSENT = "raise ModuleNotFoundError(\"No module named 'mxnet'\", name='mxnet')"
LIBRARY = "import ctypes\nctypes.CDLL({!r})"


@pythons
@pytest.mark.parametrize(
    ("text", "cure"),
    [
        (ABSENT, "pip install 'dmltrain[mxnet]' (CPU) or 'dmltrain[mxnet-cu112]'"),
        ("__version__ = '2.0.0b1'", "needs MXNet 1.9, but 2.0.0b1"),
        (LIBRARY.format("libcudart.so.11.0"), "libcudart.so.11.0 was not found: put CUDA 11.2's libraries on LD_"),
        (LIBRARY.format("libcudnn.so.8"), "CUDA 11.2, but libcudnn.so.8"),
        (LIBRARY.format("libfantasy.so.1"), "libfantasy.so.1: cannot open shared object file"),
    ],
)
def test_an_mxnet_that_cannot_be_used(tmp_path, text, cure):
    stand_in(tmp_path, "mxnet", text)
    said = refusal(tmp_path)
    if not said and "libcu" in text:
        pytest.skip("this machine has the library")
    assert cure in said


@pythons
def test_numpy_2(tmp_path):
    stand_in(tmp_path, "numpy", "__version__ = '2.1.3'")
    stand_in(tmp_path, "mxnet", "__version__ = '1.9.1'")
    assert "but 2.1.3 is installed: pip install 'numpy<2'" in refusal(tmp_path)
    done = python(f"{WITH_PTH}\nimport mxnet", tmp_path)
    assert "ImportError: MXNet 1.9.1 needs numpy 1.x, but 2.1.3" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(("library", "package"), [("libgomp.so.1", "libgomp1"), ("libquadmath.so.0", "libquadmath0")])
def test_a_library_of_debian(library, package):
    said = mxnet_compat.missing_library(f"{library}: cannot open shared object file: No such file or directory")
    assert f"needs the library {library}" in said and f"apt-get install {package} " in said


# -- which exits skip Python's exit handlers, in which MXNet's store would wait for the others ------------------------


PROGRAM = """
import sys
from dmltrain.backends.mxnet.compat import exit as mxnet_exit
class Store:
    def __del__(self):
        print("waits for all", flush=True)
mxnet_exit.watch()
store = Store()
print("printed", end=" ")
"""


def end(how: str, role: str) -> tuple[int, str, str]:
    """The exit code, what was printed, and the last line of errors."""
    done = python(PROGRAM + how, DMLC_ROLE=role)
    return done.returncode, done.stdout.strip(), done.stderr.strip().rpartition("\n")[2]


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        ("raise ValueError('wrong')", 1, "ValueError: wrong"),
        ("sys.exit(7)", 7, ""),
        ("exit(7)", 7, ""),
        ("def main():\n    try: sys.exit(7)\n    except SystemExit as ending: raise\nmain()", 7, ""),
        ("def main():\n    try: sys.exit(3)\n    except SystemExit as first: sys.exit(first.code + 4)\nmain()", 7, ""),
        ("sys.exit('wrong')", 1, "wrong"),
        ("import argparse; argparse.ArgumentParser().error('unknown')", 2, "-c: error: unknown"),
        ("sys.stdout.flush(); sys.stdout.close(); sys.exit(3)", 3, ""),
    ],
)
def test_a_failed_worker_exits_at_once(how, code, said):
    assert end(how, "worker") == (code, "printed", said)


@pytest.mark.parametrize(
    ("how", "code", "role"),
    [
        ("", 0, "worker"),
        ("sys.exit()", 0, "worker"),
        ("sys.exit(0)", 0, "worker"),
        ("try: sys.exit(3)\nexcept SystemExit: sys.exit(0)", 0, "worker"),
        ("try: sys.exit(3)\nexcept SystemExit: pass", 0, "worker"),
        ("import threading\nthreading.Thread(target=sys.exit, args=[3]).start()", 0, "worker"),
        ("sys.exit(7)", 7, "server"),
        ("sys.exit(7)", 7, "scheduler"),
    ],
)
def test_a_successful_worker_waits_for_all_and_other_roles_are_left_alone(how, code, role):
    assert end(how, role) == (code, "printed waits for all", "")
