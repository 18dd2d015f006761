"""What pip installs, and that it takes almost no time where it is not used."""

import os
import re
import runpy
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import dmltrain
from tests.wheel import copy_source, once, pip, wheel  # noqa: F401  fixtures

ROOT = Path(__file__).parents[1]
PTH = "dmltrain_mxnet.pth"
HELP_SECONDS = 0.3
PTH_SECONDS = 0.001


@pytest.mark.parametrize("way", ["wheel", "editable"])
@pytest.mark.thorough
def test_the_pth_and_the_front_door_work_in_an_environment_whose_path_has_a_space(tmp_path, request, way):
    folder = tmp_path / "an environment"
    python, site = folder / "bin/python", Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    what = [request.getfixturevalue("wheel")] if way == "wheel" else ["--editable", copy_source(tmp_path / "source")]
    pip("--python", python, "install", "--no-deps", *what)
    assert (site / PTH).read_text() == (ROOT / "dmltrain/backends/mxnet" / PTH).read_text()
    finders = (  # whether the .pth did its work, and what Python imported for it
        f"import sys\nprint({PTH!r}[:-4] in [getattr(each, '__name__', '') for each in sys.meta_path])\n"
        "print([name for name in sys.modules if name.startswith(('dmltrain', 'mxnet', 'numpy'))])"
    )
    assert output(python, "-c", finders) == "True\n[]\n"
    door = folder / "bin/dmltrain"
    assert door.read_bytes() == (ROOT / "launch/bin/dmltrain").read_bytes()
    listed = output(door)
    installed = {each.name.removeprefix("dmltrain-") for each in door.parent.glob("dmltrain-*")}
    assert {line.split()[0] for line in listed.splitlines() if line.startswith("  ")} == installed
    assert "see dmltrain help" not in listed, "a verb of this project without a description"
    assert output(door, "--version") == f"dmltrain {dmltrain.__version__}\n"
    pip("--python", python, "uninstall", "--yes", "dmltrain")
    assert not list(door.parent.glob("dmltrain*"))
    assert not list(site.glob("*dmltrain*")), list(site.iterdir())


def output(*command: str | Path) -> str:
    environment = {"PATH": os.defpath}
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout


def test_the_pth_takes_less_than_a_millisecond_of_pythons_start():
    program = (
        f"import sys, time\nline = open({str(ROOT / 'dmltrain/backends/mxnet' / PTH)!r}).read()\n"
        "began = time.perf_counter()\nexec(line)\nprint(time.perf_counter() - began)"
    )
    best = PTH_SECONDS
    for _ in range(20):
        done = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True, check=True)
        best = min(best, float(done.stdout))
    assert best < PTH_SECONDS


def test_help_is_fast():
    """By its processor time, because other processes use this machine too."""
    seconds = []
    while len(seconds) < 5 and min(seconds, default=HELP_SECONDS) >= HELP_SECONDS:
        before = os.times()
        done = subprocess.run([sys.executable, "-m", "launch.cli", "--help"], cwd=ROOT, capture_output=True, text=True)
        after = os.times()
        seconds.append(after.children_user + after.children_system - before.children_user - before.children_system)
        assert done.returncode == 0 and "--num-workers" in done.stdout
    assert min(seconds) < HELP_SECONDS, seconds


def test_mxnet_is_required_only_where_it_runs(monkeypatch):
    """numpy<2 has no wheels for newer Pythons, where MXNet is not available anyway."""
    setuptools = pytest.importorskip("setuptools")
    facts = {}
    monkeypatch.setattr(setuptools, "setup", lambda **given: facts.update(given))
    runpy.run_path(str(ROOT / "setup.py"))
    needs = facts["extras_require"]["mxnet-cu112"]
    assert needs[:2] == ['mxnet-cu112==1.9.1; python_version < "3.12"', 'numpy<2; python_version < "3.12"']
    assert all(need.endswith('; python_version < "3.12"') for need in needs)
    exact = dict(re.findall(r"^([\w-]+)==([^\s;]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert exact["mxnet"] == "1.9.1" and exact["numpy"].startswith("1.")
