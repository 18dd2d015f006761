"""What the logs of a run say of the whole run: from dmltrain's first lines, MXNet's arguments, and job.json."""

import io
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from dmltrain.report import reading
from dmltrain.report.runs import arguments
from dmltrain.report.runs.facts import Facts, facts
from dmltrain.report.runs.head import LONGEST, MOST, Head
from dmltrain.report.runs.run import Run

ROOT = Path(__file__).parents[2]
INTRODUCTION = """\
2026-11-21 03:34:48,960 Node[{rank}] dmltrain 0.5.0: examples/train_cifar10.py --lr 0.05
2026-11-21 03:34:48,960 Node[{rank}] start with arguments Options(network='resnet', num_layers=20, lr=0.05, \
image_shape=(3, 32, 32), crop=None, lr_step_epochs=(3,), kv_store='dist_ssp', staleness=10, seed=7, backend='torch')
2026-11-21 03:34:48,960 Node[{rank}] Network resnet-20: 272541 parameters, input 3x32x32, 10 classes, float32
2026-11-21 03:34:48,960 Node[{rank}] Data cifar10 in my data: 50000 training and 10000 validation samples
2026-11-21 03:34:48,960 Node[{rank}] Host {host}: Xeon(R), 2.1 GHz, 8 cores, 23.5 GiB memory, Linux 6.1, \
Python 3.11.7, torch 2.13.0+cpu, 4 threads, Tesla M60
2026-11-21 03:34:48,960 Node[{rank}] Batch 64 per worker, 128 in all; seed 7
2026-11-21 03:34:48,960 Node[{rank}] Start training with 2 x gpu, 2 workers, dist_ssp
2026-11-21 03:34:48,960 Node[{rank}] Limits: the network carries 9.3 MB/s out and 12.0 MB/s in at once
2026-11-21 03:34:48,960 Node[{rank}] Training epochs 0 to 3, 391 batches each
2026-11-21 03:36:16,756 Node[{rank}] Epoch[0] Train-accuracy=0.421680
"""


def of_text(text: str | bytes, name: str = "x.log") -> Facts:
    """The facts of a log that is no file."""
    survey = reading.survey(io.BytesIO(text.encode() if isinstance(text, str) else text))
    return facts(Run(name, (name,), heads=(survey.head,)))


def folder_of(tmp_path: Path, record: object = None, hosts: tuple[str, ...] = ("node1", "node2")) -> Path:
    for rank, host in enumerate(hosts):
        (tmp_path / f"worker-{rank}.log").write_text(INTRODUCTION.format(rank=rank, host=host))
    if record is not None:
        text = record if isinstance(record, str) else json.dumps(record)
        (tmp_path / "job.json").write_text(text)
    return tmp_path


def test_first_lines_and_the_record_of_the_job_also_for_a_worker_and_a_restart(tmp_path: Path) -> None:
    (run,) = reading.read(str(folder_of(tmp_path)))
    found = facts(run)
    assert found.command == "examples/train_cifar10.py --lr 0.05"
    assert (found.network, found.parameters, found.backend) == ("resnet-20", 272541, "torch")
    assert (found.dataset, found.training_samples, found.validation_samples) == ("cifar10", 50000, 10000)
    assert (found.workers, found.devices, found.device) == (2, 2, "gpu")
    assert (found.batch, found.batches) == (64, 391)
    assert found.hosts == found.worker_hosts == ("node1", "node2")
    assert found.versions == {"dmltrain": "0.5.0", "python": "3.11.7", "torch": "2.13.0+cpu"}
    first = found.machines[0]
    assert (first.processor, first.cores, first.memory, first.system) == ("Xeon(R), 2.1 GHz", 8, 23.5, "Linux 6.1")
    assert first.describe() == "Xeon(R), 2.1 GHz, 8 cores, Tesla M60"
    assert found.limits == "the network carries 9.3 MB/s out and 12.0 MB/s in at once"
    chosen = {"lr": 0.05, "image_shape": "3,32,32", "lr_step_epochs": "3", "crop": None}
    assert found.options.items() >= chosen.items()
    assert (found.launcher, found.exit_code, found.notes) == (None, None, ())
    folder = folder_of(tmp_path, {"format": 1, "launcher": "ssh", "num_servers": 3})
    assert facts(reading.read(str(folder / "worker-1.log"))[0]).servers == 3
    (folder / "restart-2").mkdir()
    restarted = folder_of(folder / "restart-2")
    assert facts(reading.read(str(restarted))[0]).launcher == "ssh"
    (folder / "other.log").write_text(INTRODUCTION.format(rank=0, host="node1"))
    assert facts(reading.read(str(folder / "other.log"))[0]).launcher is None  # not named by the launcher


def test_real_logs(logs: Path) -> None:
    def of(name: str) -> Facts:
        return facts(reading.read(str(logs / "mxnet" / f"{name}.log"))[0])

    cifar = of("mxnet_nb_module_cifar10_1")
    assert (cifar.network, cifar.batch, cifar.devices, cifar.device) == ("inception-bn-28-small", 128, 1, "gpu")
    assert cifar.options["kv_store"] == "local"
    assert (of("coderzbx_nohup_root").devices, of("gluoncv_imagenet_resnet50_v1").batch) == (5, 1024)
    assert (of("mlperf06_dgx1_1node").workers, of("mxnet_ilsvrc12_incept_2").devices) == (8, 2)
    assert of("mxnet_cifar10_incept_4") == Facts()
    # Format 0 of job.json, and logs of dmltrain 0.1.
    found = facts(reading.read(str(ROOT / "logs/reference/cifar10-resnet20-sync"))[0])
    assert (found.launcher, found.workers, found.servers, found.exit_code) == ("local", 2, 2, 0)
    assert (found.started, found.seconds) == ("2026-11-21T04:12:48+0000", 329.987)
    assert found.hosts == ("localhost",) and found.options["kv_store"] == "dist_sync"


HOSTILE = {
    "calls": "Namespace(lr=open('/etc/passwd').read(), n=1)",
    "no name": "Namespace(1, 2)",
    "deep": "Namespace(x=" + "(" * 5000 + ")" * 5000 + ")",
    "minus": "Namespace(x=" + "-" * 12000 + "1)",
    "sum": "Namespace(x=" + "1+" * 7000 + "1)",
    "attributes": "Namespace(x=a" + ".a" * 7000 + ")",
    "damaged": "Options(network='resnet', num_la",
    "quote": "Options(network='resnet)",
    "huge number": "Options(lr=" + "9" * 10000 + ")",
    "nul": "Options(lr=0.1, x='\0')",
    "huge": "Options(" + ", ".join(f"a{n}={n}" for n in range(3000)) + ")",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_arguments_are_not_evaluated_and_hostile_ones_are_text_or_nothing(name: str) -> None:
    found = arguments.read(HOSTILE[name])
    assert found is None or all(isinstance(value, str | int | float | None) for value in found.values())
    of_text(f"Node[0] start with arguments {HOSTILE[name]}\nEpoch[0] Train-accuracy=0.5\n")
    assert name not in ("deep", "damaged", "quote", "nul", "huge") or found is None
    assert name != "calls" or found == {"lr": "open('/etc/passwd').read()", "n": 1}
    assert arguments.read("Options(a=-1, b=[1, 'x'], c=nan, d=True)")["b"] == "1,x"


BROKEN = {
    **{"no JSON": "{", "an array": "[]", "deep": "[" * 200_000, "a later format": '{"format": 2}'},
    **{"a format of text": '{"format": "<b>"}', "huge": '{"x": "' + "x" * (5 << 20) + '"}'},
    "bytes": '{"format": 1, "x": "\udcff"}',
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_record_is_a_note(tmp_path: Path, name: str, parse: Callable) -> None:
    folder = folder_of(tmp_path)
    (folder / "job.json").write_bytes(BROKEN[name].encode("utf-8", "surrogateescape"))
    found = facts(reading.read(str(folder))[0])
    assert (found.network, found.launcher) == ("resnet-20", None)
    (note,) = found.notes
    assert note.startswith(f"{folder}/job.json is not read: ")
    done = parse("--summary", folder)
    assert len(note) < 600 and note in done.stderr and done.returncode == 0


def test_values_of_a_wrong_type_in_a_record_are_missing_and_a_pipe_keeps_nobody_waiting(tmp_path: Path) -> None:
    record = {
        **{"launcher": ["x"], "num_workers": "two", "num_servers": True, "hosts": [{"name": 5}, 7], "seconds": "1"},
        **{"versions": [], "command": {"a": 1}, "processes": [{"role": "worker"}, None], "exit_code": -1, "cause": 0},
    }
    hosts = ("<b>|node</b>", "node2")  # HTML in a name is kept as text
    found = facts(reading.read(str(folder_of(tmp_path, record, hosts)))[0])
    assert (found.launcher, found.servers, found.exit_code, found.seconds, found.cause) == (None,) * 5
    assert found.hosts == hosts and found.host == hosts[0]
    (tmp_path / "job.json").unlink()
    os.mkfifo(tmp_path / "job.json")
    (note,) = facts(reading.read(str(tmp_path))[0]).notes
    assert "not a regular file" in note


def test_only_the_start_of_a_log_is_kept() -> None:
    head = Head()
    log = b"Node[0] dmltrain 0.5.0: x\n" + b"Node[0] Data " + b"x" * LONGEST + b"\n" + b"Options(a=1)\n" * 100_000
    for block in reading.blocks(io.BytesIO(log)):
        head.feed(block)
    assert head.lines().startswith(b"Node[0] dmltrain 0.5.0: x\nOptions(a=1)\nOptions(")
    assert len(head.lines()) <= MOST
    late = b"INFO some line\n" * 200_000 + b"Node[0] dmltrain 0.5.0: x\n"
    assert reading.survey(io.BytesIO(late)).head == b""
