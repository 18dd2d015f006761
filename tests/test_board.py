"""--tensorboard: what TensorBoard itself reads from the event files of real runs is what their logs say."""

import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dmltrain import fit
from dmltrain.base.errors import UserError
from dmltrain.logs import event_file
from dmltrain.train import board, epoch_cost
from tests.forked_job import run_forked
from tests.test_fit import DIGITS, EXAMPLES, ROOT, Log, environment, finished, installed

pytestmark = pytest.mark.filterwarnings("ignore:Please import `csr_matrix`:DeprecationWarning")  # MXNet's own
WORDS = ["--network", "mlp", "--num-examples", 640, "--batch-size", 32, "--disp-batches", 5]


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Tag -> [(step, value)], as TensorBoard shows the run in this folder."""
    read = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    read.Reload()
    return {tag: [(Scalar.step, Scalar.value) for Scalar in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


def texts(folder: Path) -> dict[str, str]:
    read = EventAccumulator(str(folder), size_guidance={"tensors": 0})
    read.Reload()
    names = {name for name in read.Tags()["tensors"] if read.SummaryMetadata(name).plugin_data.plugin_name == "text"}
    return {name: read.Tensors(name)[-1].tensor_proto.string_val[0].decode() for name in names}


@pytest.fixture
def run(capfd):
    """A program in this process, where torch is imported already."""

    def run_here(*words: object) -> Log:
        found = fit.main([str(word) for word in (*WORDS, *words)], prog="train", defaults=DIGITS)
        text = capfd.readouterr().err
        assert found == 0, text
        return Log(text)

    return run_here


def values(log: Log, name: str, node: int = 0) -> list[float]:
    return [float(each) for each in log.values(name, node)]


def line(log: Log, name: str, node: int = 0) -> list[dict[str, float]]:
    """The values of the lines Usage or Communication."""
    found = re.findall(rf"Node\[{node}\] Epoch\[\d+\] {name}: (.*)", log.text)
    return [{key: float(value) for key, value in re.findall(r"(\S+)=(\S+)", each)} for each in found]


def agrees(found: list[tuple[int, float]], steps: list[int], said: list[float], absolute: float = 1e-6) -> None:
    assert [step for step, _ in found] == steps
    assert [value for _, value in found] == pytest.approx(said, rel=1e-5, abs=absolute)


def ran(folder: Path, program: str, *words: object) -> tuple[int | None, str]:
    """The exit code and the output of a program that is forked from a process without TensorBoard."""
    (folder / "program.py").write_text(program)
    return run_forked(folder, folder / "program.py", *words, environment=environment())


@pytest.mark.thorough
def test_the_workers_of_a_job(tmp_path):
    """640 samples over two workers: ten steps an epoch. What a worker says in its log is in its events."""
    words = [*WORDS, "--kv-store", "dist_sync", "--num-epochs", 2, "--test-interval", 4]
    logs = finished(tmp_path / "job", 2, 1, *words, "--tensorboard", tmp_path / "board")
    assert {path.name for path in (tmp_path / "board").iterdir()} == {"worker-0", "worker-1"}
    named = {f"Train-{each}": f"train/{each}" for each in ("accuracy", "cross-entropy")}
    named |= {each: f"run/{each.lower()}" for each in ("Speed", "Learning-rate", "Sent")}
    for node, log in enumerate(logs):
        steps = scalars(tmp_path / f"board/worker-{node}")
        epochs = scalars(tmp_path / f"board/worker-{node}/epochs")
        for found, places, prefix in ((steps, [10, 20], ""), (epochs, [1, 2], "epoch-")):
            for name, tag in named.items():
                agrees(found[prefix + tag], places, values(log, name, node))
            agrees(found[prefix + "run/seconds"], places, values(log, "Time cost", node), 5e-4)
            agrees(found[prefix + "usage/cpu"], places, [each["cpu"] for each in line(log, "Usage", node)], 5e-4)
            parts = line(log, "Communication", node)
            agrees(found[prefix + "communication/bound"], places, [part["bound"] for part in parts], 5e-4)
            shares = [found[f"{prefix}communication/{name}"] for name in parts[0] if name != "bound"]
            for at in (0, 1):
                assert sum(share[at][1] for share in shares) == pytest.approx(1.0)
        agrees(epochs["epoch-validation/accuracy"], [1, 2], values(log, "Validation-accuracy", node))
        tests = re.findall(rf"Node\[{node}\] (Step|Epoch)\[(\d+)\] Validation-accuracy=(\S+)", log.text)
        places = [int(number) if kind == "Step" else 10 * int(number) + 10 for kind, number, _ in tests]
        agrees(steps["validation/accuracy"], places, [float(value) for *_, value in tests])
        assert {4, 8, 10, 12, 16, 20} <= set(places)
        lines = re.findall(rf"Node\[{node}\] Epoch\[(\d+)\] Batch \[(\d+)\]\tSpeed: (\S+).*?\taccuracy=(\S+)", log.text)
        places = [10 * int(epoch) + int(batch) + 1 for epoch, batch, *_ in lines]
        agrees(steps["batch/accuracy"], places, [float(value) for *_, value in lines])
        agrees(steps["batch/speed"], places, [float(speed) for *_, speed, _ in lines], 0.01)


@pytest.mark.parametrize("backend", ["torch", pytest.param("mxnet", marks=pytest.mark.thorough)])
def test_a_run_that_resumes_continues_its_curves(tmp_path, backend, run):
    """The first run makes three epochs; its last checkpoint is lost, so the second begins at the third again."""
    installed(backend)
    words = ["--backend", backend, "--model-prefix", tmp_path / "m", "--tensorboard", tmp_path / "b", "--lr", 0.05]
    first = run(*words, "--num-epochs", 3)
    for path in tmp_path.glob("m-0003*"):  # with MXNet two files
        path.unlink()
    second = run(*words, "--num-epochs", 4, "--load-epoch", "last")
    said = values(first, "Train-accuracy")[:2] + values(second, "Train-accuracy")
    assert len(said) == 4
    folder = tmp_path / "b/worker-0"
    agrees(scalars(folder)["train/accuracy"], [20, 40, 60, 80], said)
    agrees(scalars(folder / "epochs")["epoch-train/accuracy"], [1, 2, 3, 4], said)
    batches = [step for step, _ in scalars(folder)["batch/accuracy"]]
    assert batches == sorted(set(batches)) and len(batches) == 4 * 3
    shown = texts(folder)
    assert "| --lr | 0.05 |" in shown["options"] and f"| --backend | {backend} |" in shown["options"]
    assert shown["command"].startswith("    ")


@pytest.mark.thorough
def test_without_the_option_nothing_is_imported_or_written(tmp_path):
    program = (
        "import sys\nfrom dmltrain import fit\n"
        "fit.main(['--num-epochs', '1', '--num-examples', '64'], defaults={'dataset': 'digits', 'network': 'mlp'})\n"
        "print([name for name in sys.modules if name.startswith('tensorboard')])\n"
    )
    code, text = ran(tmp_path, program)
    assert code == 0 and text.endswith("\n[]\n"), text
    assert {path.name for path in tmp_path.iterdir()} == {"program.py", "program.log"}


def test_the_writer_imports_no_framework():
    program = (
        "import sys\nfrom dmltrain.logs import event_file\nevent_file.library()\n"
        "print({'torch', 'mxnet', 'tensorflow', 'grpc'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "set()\n", done.stderr


def test_a_missing_package_is_an_error_before_anything_else(tmp_path):
    program = (
        "import sys\nsys.modules['tensorboard'] = None\nfrom dmltrain import fit\n"
        "sys.exit(fit.main(['--tensorboard', '/nowhere', '--data-dir', '/none'], prog='train', "
        "defaults={'dataset': 'mnist', 'network': 'mlp'}))"
    )
    code, text = ran(tmp_path, program)
    assert code == 2
    expected = r"train: error: --tensorboard needs the package tensorboard, .*: pip install 'dmltrain\[tensorboard\]'\n"
    assert re.fullmatch(expected, text), text


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=f"--tensorboard: cannot write to {tmp_path}/file/b: Not a directory; choose"):
        board.check(str(tmp_path / "file/b"))


@pytest.mark.thorough
def test_a_full_disk_ends_the_events_and_not_the_training(tmp_path):
    words = [*WORDS, "--tensorboard", tmp_path, "--num-epochs", 4, "--disp-batches", 1]
    done = subprocess.run(  # its log goes into a pipe, which has no limit
        [str(each) for each in (sys.executable, EXAMPLES / "train_digits.py", *words)],
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (6_000, 6_000)),
    )
    assert done.returncode == 0, done.stderr
    log = Log(done.stderr)
    assert len(values(log, "Train-accuracy")) == 4 and log.digest()
    assert log.text.count("Nothing more is written for TensorBoard: File too large\n") == 1
    found = scalars(tmp_path / "worker-0")["batch/accuracy"]
    shown = [step for step in range(1, 81) if step % 20 != 1]  # all batches but an epoch's first
    assert 5 < len(found) < 60 and [step for step, _ in found] == shown[: len(found)]


@pytest.mark.parametrize(
    ("name", "tag"),
    [
        ("Train-top_k_accuracy_5", "train/top_k_accuracy_5"),
        ("Validation-cross-entropy", "validation/cross-entropy"),
        ("Time cost", "run/seconds"),
        ("Device-Memory", "run/device-memory"),
        ("Staleness", "run/staleness"),
    ],
)
def test_tags(name, tag):
    assert board.tag(name) == tag


def test_shares():
    spent = {"bound": 0.5, "compute": 3.0, "own-host": 0.0, "wire": 1.0}
    assert epoch_cost.shares(spent) == {"bound": 0.5, "compute": 0.75, "own-host": 0.0, "wire": 0.25}
    assert epoch_cost.shares({"compute": 0.0, "wire": 0.0}) == {}


def test_not_a_number_and_infinity_are_shown_as_such(tmp_path):
    file = event_file.EventFile(tmp_path)
    file.scalars(1, {"a": float("nan"), "b": float("inf")})
    file.close()
    found = scalars(tmp_path)
    assert str(found["a"][0][1]) == "nan" and str(found["b"][0][1]) == "inf"
