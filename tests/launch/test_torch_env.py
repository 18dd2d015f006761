"""--torch-env: which workers find the variables of torch.distributed, and when servers would be idle."""

from collections.abc import Callable

import pytest

from dmltrain_launch import LaunchError
from dmltrain_launch.cli import launch
from dmltrain_launch.command_line.options import parse
from dmltrain_launch.job.host import Host
from dmltrain_launch.job.job import Job
from dmltrain_launch.job.role import WORKER
from dmltrain_launch.job.task import Ports, tasks
from dmltrain_launch.preflight.script import Script, of_source, read, script_of
from dmltrain_launch.run.described import advice, make_job

VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
NEITHER_OF_THEM = "import json"
USES_DMLTRAIN = "def later():\n    from dmltrain import kvstore\n"
USES_MXNET = "def later():\n    import mxnet as mx\n"
USES_BACKEND = "def later():\n    import dmltrain.torch\n"
USES_DDP = "def later():\n    import torch.distributed as dist\n"
IDLE = "uses torch.distributed and not dmltrain: its servers have nothing to do"


@pytest.fixture
def made(tmp_path) -> Callable[..., Job]:
    """Makes the job of this script."""

    def make(source: str, *options: str) -> Job:
        (tmp_path / "program.py").write_text(source)
        return make_job(parse([*options, str(tmp_path / "program.py")], {}), "job")

    return make


@pytest.mark.parametrize(
    ("options", "source", "expected"),
    [
        ((), NEITHER_OF_THEM, VARIABLES),
        ((), USES_DMLTRAIN, ()),
        ((), USES_MXNET, ()),
        ((), f"{USES_MXNET}{USES_DDP}", VARIABLES),
        ((), USES_BACKEND, VARIABLES),
        (("--torch-env", "auto"), USES_DMLTRAIN, ()),
        (("--torch-env", "on"), USES_DMLTRAIN, VARIABLES),
        (("--torch-env=off",), NEITHER_OF_THEM, ()),
        (("python3", "-u"), USES_DMLTRAIN, ()),  # the script that an interpreter is named for
    ],
)
def test_what_workers_find(made, options, source, expected):
    """No other process has any."""
    for task in tasks(made(source, "-n", "2", "-s", "1", *options), [Host("h1")], Ports()):
        found = [name for name in VARIABLES if name in task.environment]
        assert found == (list(expected) if task.role == WORKER else []), task.name


def test_a_dry_run_shows_the_same(tmp_path, capsys):
    (tmp_path / "program.py").write_text(USES_DMLTRAIN)
    words = ["-n", "2", str(tmp_path / "program.py")]
    assert launch(["--dry-run", *words]) == launch(["--dry-run", "--torch-env", "on", *words]) == 0
    usual, _, with_torch = capsys.readouterr().out.rpartition("dry run of job")
    assert "DMLC_ROLE=worker" in usual and "RANK=" not in usual and " RANK=1 " in with_torch


def test_it_is_a_key_of_the_configuration_file_and_takes_few_values(tmp_path):
    (tmp_path / "job.yml").write_text("num-workers: 2\ntorch-env: off\nprogram: train.py\n")
    assert parse(["--config", str(tmp_path / "job.yml")], {}).torch_env == "off"
    with pytest.raises(LaunchError, match="--torch-env yes: expected one of auto, on, off"):
        parse(["--torch-env", "yes", "train.py"], {})


@pytest.mark.parametrize(
    ("source", "servers", "warned"),
    [(USES_DDP, 1, True), (USES_DDP, 0, False), (NEITHER_OF_THEM, 1, False), (USES_DDP + USES_DMLTRAIN, 1, False)],
)
def test_servers_that_would_be_idle(made, source, servers, warned):
    job = made(source, "-n", "1", "-s", str(servers))
    assert any(IDLE in each for each in advice(job, [Host("h1")], "auto")) == warned


def test_a_launcher_says_that_servers_would_be_idle(launcher):
    assert IDLE in launcher.start("-n", 1, "-s", 1, launcher.script(USES_DDP)).ends().err


@pytest.mark.parametrize(
    ("workers", "torch_env", "program", "warned"),
    [(3, "on", "train.py", "h1 2, h2 1"), (4, "on", "train.py", ""), (3, "auto", "train.py", "")]
    + [(3, "auto", "lightning.py", "h1 2, h2 1"), (3, "off", "lightning.py", "")],
)
def test_lightning_cannot_use_unequal_numbers_of_workers(tmp_path, monkeypatch, workers, torch_env, program, warned):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import torch.distributed")
    (tmp_path / "lightning.py").write_text("import lightning.pytorch as pl")
    made = make_job(parse(["-n", str(workers), "-s", "0", "-H", "hosts", "--torch-env", torch_env, program], {}), "job")
    found = advice(made, [Host("h1"), Host("h2"), Host("h3", roles=("server",))], torch_env)
    assert [warned in each for each in found] == [True] * bool(warned)


REPORTS = f"""{USES_DDP}
import json, os, sys, torch.distributed as dist
dist.init_process_group("nccl")
print("found", dist.get_backend(), __name__, sys.argv[1:], json.load.__module__, "RANK" in os.environ)
"""


def test_a_script_gets_the_backend_in_place_of_its_own_and_servers_do_not_run_it(launcher):
    script = launcher.script(REPORTS)
    done = launcher.run("-n", 1, "-s", 1, "--torch-backend", "dmltrain", script, "--epochs", 3)
    assert done.code == 0 and IDLE not in done.err, done
    assert done.out.count(b'init_process_group("nccl") takes the backend "dmltrain"') == 1, done
    assert done.out.count(b"found dmltrain __main__ ['--epochs', '3'] json True") == 1, done
    assert not launcher.log("server-0").count(b"found"), "it does not run the script"


@pytest.mark.parametrize(
    ("program", "argv"),
    [
        ("train.py --lr 1", "PYTHON -m dmltrain.torch train.py --lr 1"),
        ("python3 -u train.py x.py", "python3 -u -m dmltrain.torch train.py x.py"),
        ("python3 -m train", ""),
        ("./train.sh a.py", ""),
    ],
)
def test_what_starts_a_script_with_the_backend_in_place_of_its_own(program, argv):
    options = parse(["-n", "2", "-s", "1", "--torch-backend", "dmltrain", *program.split()], {})
    if not argv:
        with pytest.raises(LaunchError, match="is not a Python script: expected train.py"):
            make_job(options, "job")
        return
    made = make_job(options, "job")
    assert made.torch_env
    started = tasks(made, [Host("h1", python="PYTHON")], Ports())
    assert {" ".join(task.argv) for task in started} == {argv} and len(started) == 4


DMLTRAIN = ["import dmltrain", "import dmltrain.kvstore as kv", "from dmltrain import rank", "import os, dmltrain"]
DMLTRAIN += ["if True:\n    import dmltrain", "import sys; sys.path.insert(0, '..')\nfrom dmltrain.fit import fit"]
DDP = ["import torch.distributed as dist", "from torch import distributed", "from torch.distributed import init"]
DDP += ["from torch.distributed.elastic import x", "import torch\ntorch.distributed.init_process_group('gloo')"]
NEITHER = ["", "import torch", "import dmltrainer", "from . import dmltrain", "from .dmltrain import x", "dmltrain = 3"]
NEITHER += ["'import dmltrain'", "# import dmltrain", "import torch.distributions", "no python at all", "\0"]


@pytest.mark.parametrize("source", [*DMLTRAIN, *DDP, *NEITHER])
def test_what_a_script_uses(source):
    assert of_source(source) == Script(uses_dmltrain=source in DMLTRAIN, uses_torch_distributed=source in DDP)


@pytest.mark.parametrize(
    ("argv", "script"),
    [
        (["train.py", "other.py"], "train.py"),
        (["python", "-u", "train.py"], "train.py"),
        ([], ""),
        (["/usr/bin/python3.12", "train.py"], "train.py"),
        (["sh", "-c", "train.py"], ""),
        (["python", "-m", "train"], ""),
        (["./train"], ""),
    ],
)
def test_the_script_of_a_command(argv, script):
    assert script_of(argv) == script


def test_a_script_that_cannot_be_read(tmp_path):
    (tmp_path / "bytes.py").write_bytes(b"import dmltrain # \xff")
    for path in (tmp_path / "none.py", tmp_path / "bytes.py", tmp_path):
        assert read([str(path)]) == Script()
    (tmp_path / "train.py").write_text("import dmltrain  # ñ", encoding="utf-8")
    assert read([str(tmp_path / "train.py")]) == Script(uses_dmltrain=True)
