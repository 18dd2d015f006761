"""A training process keeps the memory that it frees, in real processes."""

import os
import platform
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from dmltrain.base import malloc_tuning

ROOT = Path(__file__).parents[1]
MIB = 40  # larger than any block that glibc keeps by itself
PAGES = MIB * 2**20 // os.sysconf("SC_PAGESIZE")
ALLOCATE = f"""
import resource

def faults():
    since = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        b"x" * ({MIB} << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - since

faults()
print("faults", faults())
"""
MODEL = (
    "from dmltrain.backends.torch import plain_step; plain_step.postpone_compiler()\n"  # takes a second
    "import torch, dmltrain; model = torch.nn.Linear(3, 4); optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
)
DIGITS = "'--network', 'mlp', '--dataset', 'digits', '--num-epochs', '1', '--num-examples', '200'"
TRAINING = f"from dmltrain import fit\nassert fit.main([{DIGITS}]) == 0\n"
MEASURING = f"import os\nos.environ['DMLTRAIN_MEASURE'] = '0.2'\n{TRAINING}"

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library than glibc")


def faults(program, **settings):
    """Page faults of ten blocks of MIB after `program`."""
    kept = {
        name: value for name, value in os.environ.items() if name not in malloc_tuning.OWN and name != "GLIBC_TUNABLES"
    }
    command = [sys.executable, "-c", textwrap.dedent(program) + ALLOCATE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, env={**kept, **settings})
    assert done.returncode == 0, done.stderr
    return int(done.stdout.rpartition("faults ")[2])


@pytest.mark.parametrize(
    "program",
    [
        "from dmltrain.base import malloc_tuning\nassert malloc_tuning.keep_freed_memory()\n",
        MODEL + "dmltrain.distribute(model, optimizer)\n",
        pytest.param(TRAINING, marks=pytest.mark.thorough),
        pytest.param(MEASURING, marks=pytest.mark.thorough),
    ],
    ids=["alone", "distribute", "training", "measuring"],
)
def test_the_next_step_gets_freed_memory_without_page_faults(program):
    if "torch" in program or "fit" in program:
        pytest.importorskip("torch")
    assert faults(program) < PAGES


@pytest.mark.parametrize(
    "settings",
    [{"MALLOC_TRIM_THRESHOLD_": "131072"}, {"GLIBC_TUNABLES": "glibc.malloc.mmap_max=65536"}],
    ids=["variable", "tunable"],
)
def test_own_settings_of_malloc_stay(settings):
    assert (
        faults("from dmltrain.base import malloc_tuning\nassert not malloc_tuning.keep_freed_memory()\n", **settings)
        > 9 * PAGES
    )


def test_an_import_changes_nothing():
    assert faults("import dmltrain.fit\n") > 9 * PAGES
