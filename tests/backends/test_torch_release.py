"""Programs refuse releases of PyTorch with which a checkpoint can run code."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dmltrain.backends.torch import release
from dmltrain.base.errors import UserError

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("version", ["2.10.0", "2.10.0a0+git", "2.13.0+cpu", "3.0.1", "10.1"])
def test_newer_releases_are_used(version):
    release.check(version)


@pytest.mark.parametrize("version", ["2.9.1", "2.4.0+cpu", "1.13.1", "0.4.1", "unknown", ""])
def test_older_releases_are_refused_with_the_fix(version):
    facts = rf"^PyTorch {re.escape(version)} .* 2.10 .*CVE-2025-32434, CVE-2026-24747.*"
    with pytest.raises(UserError, match=f"{facts}pip install --upgrade 'torch>=2.10'$"):
        release.check(version)


def test_the_package_asks_for_the_same_release():
    assert f'"torch>={release.OLDEST[0]}.{release.OLDEST[1]}"' in (ROOT / "setup.py").read_text()


SCRIPT = "import dmltrain; dmltrain.distribute(None, None)"
STORE = """
import numpy
from dmltrain.backends.torch.backend import TorchBackend
store = TorchBackend().local_store("local")
store.init("w", numpy.zeros(3, numpy.float32))
store.set_optimizer({"name": "sgd", "lr": 0.1})
"""


DECODE = """
from dmltrain.backends.torch.backend import TorchBackend
TorchBackend().decode(b"")
"""


QUIET = "from dmltrain.base import errors; errors.end_scripts_without_traceback()\n"


@pytest.mark.parametrize(
    "command",
    [
        ["examples/train_digits.py", "--kv-store", "local", "--num-epochs", "1"],
        *(["-c", QUIET + program] for program in (SCRIPT, STORE, DECODE)),
    ],
    ids=["training program", "script", "optimizer of a store", "checkpoint"],
)
def test_a_program_with_an_older_release_ends_with_the_fix(command, tmp_path):
    """The older release is a package that has a version and nothing else: it is refused before any use."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text('__version__ = "2.9.1"')
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DML")}
    environment["PYTHONPATH"] = f"{tmp_path}:{ROOT}"
    ended = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ended.returncode == 2
    assert "PyTorch 2.9.1 is installed" in ended.stderr and "Traceback" not in ended.stderr
