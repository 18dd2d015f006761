"""dmltrain doctor: what its page says of this machine, and what it keeps to itself."""

import os
import re
import resource
import sys
from types import SimpleNamespace

import pytest

import dmltrain
from dmltrain_launch import LaunchError
from dmltrain_launch.agent.host import cores
from dmltrain_launch.commands.doctor import CUDA, doctor, page, probed

SECRET = "hunter2-4711"
SEEN = {"CUDA_VISIBLE_DEVICES": "0,1", "HIP_VISIBLE_DEVICES": "1"}
KEPT = {"DMLTRAIN_TOKEN": SECRET, "OMP_NUM_THREADS": SECRET, "PATH": SECRET, **SEEN}


@pytest.fixture(scope="module")
def facts():
    return probed()


def rows(text: str) -> dict[str, str]:
    return dict(re.split("  +", line, maxsplit=1) for line in text.splitlines() if "  " in line)


def test_the_page_has_this_machine(facts):
    found = rows(page(facts, os.environ))
    assert f"{'.'.join(map(str, sys.version_info[:3]))} (CPython)" in found["Python"]
    assert f"dmltrain {dmltrain.__version__}" in found["packages"] and "numpy 1." in found["packages"]
    assert found["cores"].startswith(f"{cores.usable(cores.report())} usable: ")
    assert f"nofile {resource.getrlimit(resource.RLIMIT_NOFILE)[0]}/" in found["limits"]
    assert "/dev/shm" in found["free space"] and re.search("synchronized: (yes|no)", found["clock"])


def test_no_value_of_the_environment_is_shown_that_can_be_a_secret(facts, monkeypatch):
    monkeypatch.setenv("HOME", os.path.dirname(sys.prefix))
    text = page(facts, KEPT)
    assert SECRET not in text and " ~/" in rows(text)["Python"]
    assert rows(text)["variables"] == (
        "CUDA_VISIBLE_DEVICES=0,1, DMLTRAIN_TOKEN, HIP_VISIBLE_DEVICES=1, OMP_NUM_THREADS"
    )


def test_it_warns_as_the_check_of_hosts_does_and_goes_without_packages(facts):
    small = {**facts, "open_files": [64, 64], "disk": {"/dev/shm": 64}, "inspection": {"error": "no answer in time"}}
    text = page({**small, "gpus": [{"name": "NVIDIA H200"}], "interfaces": []}, {})
    assert "warning: this machine: a process may open 64 files" in text and "--shm-size" in text
    assert rows(text)["error"] == "no answer in time" and rows(text)["GPUs"].startswith("NVIDIA H200")
    assert "CUDA" not in rows(text) and "packages" not in rows(text)


@pytest.mark.parametrize(("cuda", "hip", "built"), [("13.0", None, "13.0"), (None, "7.1", "ROCm-7.1")])
def test_torch_says_whose_gpus_it_is_built_for(cuda, hip, built, monkeypatch, capsys):
    gpus = SimpleNamespace(is_available=lambda: True, device_count=lambda: 2)
    torch = SimpleNamespace(cuda=gpus, version=SimpleNamespace(cuda=cuda, hip=hip))
    monkeypatch.setitem(sys.modules, "torch", torch)
    exec(CUDA)
    assert capsys.readouterr().out.split() == [built, "True", "2"]


def test_arguments_are_refused(capsys):
    with pytest.raises(LaunchError, match="^--all: this program takes no arguments but"):
        doctor(["--all"])
    assert doctor(["--version"]) == 0 and capsys.readouterr().out.startswith("dmltrain-doctor ")
