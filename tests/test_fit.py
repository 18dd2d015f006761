"""Training programs as users run them: their logs, exit codes, checkpoints and exact repetition.

What is about the loop is tried with both backends.
"""

import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from dmltrain import fit
from dmltrain.checkpoints import checkpoint
from dmltrain.kvstore.base import JOB_ENDED, MembershipEnded
from dmltrain.layers import BatchNorm, Conv, Dense, Flatten, Network, Tanh, chain
from dmltrain.logs import record
from dmltrain.mxnet_files import write
from tests.copied_tree import search_path
from tests.forked_job import ForkedJob, forker, run_forked

pytestmark = pytest.mark.filterwarnings("ignore:Please import `csr_matrix`:DeprecationWarning")  # MXNet's own
ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
DIGITS = {"dataset": "digits", "network": "mlp", "batch_size": 32, "disp_batches": 10, "kv_store": "local"}
RESNET = ["--network", "resnet", "--num-layers", "8", "--batch-size", "64"]
STAMP = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} Node\[(\d+)\] "


class Log:
    """What a program wrote, by line."""

    def __init__(self, text: str) -> None:
        self.text = text

    def values(self, name: str, node: int = 0) -> list[str]:
        """The values of `Epoch[k] name=value` of one worker, in order."""
        return re.findall(rf"Node\[{node}\] Epoch\[\d+\] {re.escape(name)}=(\S+)", self.text)

    def digest(self, node: int = 0, of: str = "Final weights") -> str:
        return re.search(rf"Node\[{node}\] {of} sha256=([0-9a-f]{{64}})", self.text)[1]

    def results(self, node: int = 0) -> list[tuple[str, ...]]:
        """All that two equal runs have in common: metrics with their epochs and batches, and the last digest."""
        name = r"(Train-\S+|Validation-\S+|Batch \[\d+\])"
        found = re.findall(rf"Node\[{node}\] (Epoch\[\d+\]) {name}(?:.*?\t(acc.*))?", self.text)
        return [*found, (self.digest(node),)]


def later(results: list[tuple[str, ...]], epoch: int) -> list[tuple[str, ...]]:
    """Those from this epoch on, as a run has that resumes there."""
    return [result for result in results if result[0] not in [f"Epoch[{before}]" for before in range(epoch)]]


@pytest.fixture
def run(capfd):
    def run_here(*words: str, code: int = 0) -> Log:
        """The program in this process, where torch is imported already."""
        found = fit.main([str(word) for word in words], prog="train", defaults=DIGITS)
        text = capfd.readouterr().err
        assert found == code, text
        assert "Traceback" not in text
        return Log(text)

    return run_here


@pytest.fixture(params=["torch", "mxnet"])
def backend(request) -> str:
    if request.param == "mxnet":
        installed("mxnet")
    return request.param


def installed(framework: str) -> None:
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed: --backend {framework} is not tried")


@pytest.fixture
def train(run, backend):
    return partial(run, "--backend", backend)


def saved(prefix: Path, epoch: int, backend: str = "torch") -> Path:
    return checkpoint.path(str(prefix), epoch, {"torch": ".pt", "mxnet": ".npz"}[backend])


# -- the log ----------------------------------------------------------------------------------------------------------


def test_the_first_lines_have_everything_needed_to_repeat_the_run(train, backend):
    text = train("--num-epochs", 1, "--seed", 7).text
    head = text[: text.index("Training epochs")]
    for essential in (
        *("dmltrain 0.", "mlp: 17226 parameters", "input 1x8x8", "10 classes", "float32", "1437 training"),
        *("360 validation", "1 x cpu, 1 workers, local", "Batch 32 per worker", "seed 7", f"{backend} "),
        *(f"update_on_kvstore={int(backend == 'mxnet')},", "threads", "GiB memory", "num_epochs=1"),
        socket.gethostname(),
    ):
        assert essential in head, essential
    assert "Training epochs 0 to 0, 45 batches each\n" in text
    assert all(re.match(STAMP, line) for line in text.splitlines())


def test_an_epochs_lines(train):
    log = train("--num-epochs", 2, "--top-k", 3, "--lr-step-epochs", 1, "--lr", 0.05)
    assert "Communication" not in log.text, "a single process does not communicate"
    used = [dict(re.findall(r"(\S+)=(\S+)", line)) for line in re.findall(r"Epoch\[\d+\] Usage: (.*)", log.text)]
    assert [tuple(each) for each in used] == [("cpu", "host-cpu", "memory", "host-memory")] * 2, "there is no GPU"
    for each in used:
        assert 0.01 < float(each["cpu"]) < 1.1 * os.cpu_count() and float(each["memory"]) > 50
        assert 0 < float(each["host-cpu"]) <= 1 and 0 < float(each["host-memory"]) < 1
    names = ("accuracy", "top_k_accuracy_3", "cross-entropy")
    for name in [f"{kind}-{name}" for kind in ("Train", "Validation") for name in names]:
        assert len(log.values(name)) == 2, name
    for name in ("Time cost", "Speed", "Memory", "Sent", "Received"):
        assert len(log.values(name)) == 2 and all(float(value) >= 0 for value in log.values(name)), name
    assert [float(value) for value in log.values("Learning-rate")] == [0.05, pytest.approx(0.005)]
    assert float(log.values("Validation-accuracy")[1]) > 0.85
    batches = re.findall(r"Epoch\[1\] Batch \[(\d+)\]\tSpeed: [\d.]+ samples/sec\taccuracy=([\d.]+)\t", log.text)
    assert [int(number) for number, _ in batches] == [10, 20, 30, 40]


def test_a_run_of_zero_epochs(train):
    assert "Nothing to train: 0 of --num-epochs 0" in train("--num-epochs", 0).text


def test_both_backends_start_with_the_same_weights_and_batches(run):
    """The same first weights and the same batches: the first batches' losses agree, and the log has the same lines."""
    installed("mxnet")
    words = ["--num-epochs", 1, "--disp-batches", 1, "--lr", 0.01, "--mom", 0]
    logs = [run("--backend", each, *words) for each in ("torch", "mxnet")]
    losses = [[float(loss) for loss in re.findall(r"Batch \[\d+\].*cross-entropy=([\d.]+)", log.text)] for log in logs]
    assert losses[0] == pytest.approx(losses[1], abs=2e-5) and len(losses[0]) == 44
    names = [re.findall(r"Epoch\[0\] ([\w-]+(?: cost)?)=", log.text) for log in logs]
    assert names[0] == names[1] and len(names[0]) > 9


# -- the same again ---------------------------------------------------------------------------------------------------


def test_the_same_command_gives_the_same_run(train):
    words = [*RESNET, "--devices", "cpu:2", "--optimizer", "adam"]
    first, second = (train(*words, "--num-epochs", 2, "--num-examples", 300) for _ in range(2))
    assert first.results() == second.results() and len(first.results()) > 6
    assert train(*words, "--num-epochs", 2, "--num-examples", 300, "--seed", 1).digest() != first.digest()


@pytest.mark.parametrize(
    "words",
    [
        ["--optimizer", "adam"],
        [*RESNET, "--devices", "cpu:2"],
        pytest.param(["--dtype", "float16"], marks=pytest.mark.thorough),
        pytest.param(["--warmup-epochs", "2", "--lr-step-epochs", "2"], marks=pytest.mark.thorough),
    ],
    ids=" ".join,
)
def test_a_resumed_run_equals_an_uninterrupted_one(train, backend, tmp_path, words):
    if backend == "mxnet" and "float16" in words:
        words = ["--optimizer", "rmsprop"]
    words = [*words, "--num-examples", 300, "--model-prefix", tmp_path / "m"]
    whole = train(*words, "--num-epochs", 3)
    kept = saved(tmp_path / "m", 3, backend).read_bytes()
    saved(tmp_path / "m", 3, backend).unlink()
    resumed = train(*words, "--num-epochs", 3, "--load-epoch", 1)
    assert resumed.results() == later(whole.results(), 1)
    assert "Loaded checkpoint of epoch 1\n" in resumed.text
    assert len(kept) == len(saved(tmp_path / "m", 3, backend).read_bytes())


def test_changed_options_since_the_checkpoint_are_logged(train, tmp_path):
    train("--num-epochs", 1, "--model-prefix", tmp_path / "m")
    log = train("--num-epochs", 2, "--model-prefix", tmp_path / "m", "--load-epoch", 1, "--batch-size", 16, "--seed", 3)
    assert "changed since: seed 0 -> 3, batch_size 32 -> 16\n" in log.text


def test_a_run_continues_from_the_weights_of_an_old_mxnet_job(run, tmp_path):
    """PREFIX-0002.params alone, as MXNet's image-classification examples leave it; `last` finds it too. Both backends
    read it, and the torch backend does not need MXNet."""
    installed("mxnet")
    words = ["--model-prefix", tmp_path / "m"]
    before = run("--backend", "mxnet", *words, "--num-epochs", 2)
    for epoch in (1, 2):
        saved(tmp_path / "m", epoch, "mxnet").unlink()
    for backend in ("mxnet", "torch"):
        for which in (2, "last"):
            log = run("--backend", backend, *words, "--num-epochs", 2, "--load-epoch", which)
            assert "Loaded weights of epoch 2; the optimizer starts afresh\n" in log.text
            assert log.digest() == before.digest()
    for backend in ("mxnet", "torch"):
        log = run("--backend", backend, *words, "--num-epochs", 3, "--load-epoch", "last")
        assert "Training epochs 2 to 2" in log.text
        saved(tmp_path / "m", 3, backend).unlink()
        (tmp_path / "m-0003.params").unlink(missing_ok=True)
        text = run("--backend", backend, *words, *RESNET, "--load-epoch", 2, code=2).text
        assert "m-0002.params belong to another network than resnet-8: " in text
    (tmp_path / "m-0002.states").write_bytes(b"a pickle")
    text = run(*words, "--num-epochs", 2, "--load-epoch", 2).text
    assert "the optimizer starts afresh (m-0002.states is a pickle, which is not read)\n" in text
    content = (tmp_path / "m-0002.params").read_bytes()
    for damaged in (content[: len(content) // 2], content[:500] + bytes([content[500] ^ 1]) + content[501:]):
        (tmp_path / "m-0004.params").write_bytes(damaged)
        text = run(*words, "--load-epoch", 4, code=2).text
        assert "m-0004.params" in text and ("is damaged or truncated" in text or "cannot read the weights" in text)
        text = run(*words, "--num-epochs", 2, "--load-epoch", "last").text
        assert "Loaded weights of epoch 2;" in text and re.findall("Skipped .*m-000(.).params", text) == ["4"]


def test_files_for_mxnet_are_written_and_any_run_continues_from_them(run, tmp_path):
    """The graph, too, names the network: for either backend, and without MXNet for PyTorch."""
    words = ["--model-prefix", tmp_path / "m", "--num-epochs", 2]
    before = run(*words, *RESNET, "--save-format", "params")
    names = {"m-0001.pt", "m-0002.pt", "m-symbol.json", "m-0001.params", "m-0002.params"}
    assert {path.name for path in tmp_path.iterdir()} == names
    saved(tmp_path / "m", 2).unlink()
    graph = ["--network", tmp_path / "m-symbol.json", "--batch-size", "64"]
    for backend in ("torch", "mxnet"):
        if importlib.util.find_spec(backend):
            log = run(*words, *graph, "--load-epoch", 2, "--backend", backend)
            assert "Network m: " in log.text and log.digest() == before.digest()
            kept = run(*words, *RESNET, "--load-epoch", 2, "--backend", backend)
            assert kept.digest() == before.digest()
    more = run(*words[:2], "--num-epochs", 3, *graph, "--load-epoch", 2)
    assert float(more.values("Validation-accuracy")[0]) > 0.5
    (tmp_path / "m-symbol.json").write_text("{}")
    text = run(*words, *graph, "--load-epoch", 2, code=2).text
    assert "cannot read the graph in" in text and "m-symbol.json: it has no nodes and heads" in text


# -- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words, essentials",
    [
        (["--network", "missing-symbol.json"], ["missing-symbol.json: No such file", "PREFIX-symbol.json"]),
        (["--network", "a-symbol.json", "--num-layers", "20"], ["a-symbol.json has a single depth", "--num-layers 20"]),
        (["--network", "a-symbol.json", "--num-group", "2"], ["a-symbol.json is a graph in a file", "--num-group"]),
        (["--save-format", "onnx"], ["unknown format 'onnx'", "own, params"]),
        (["--network", "resnet", "--num-layers", "21"], ["21", "20, 32, 44"]),
        (["--kv-store", "dist_sync"], ["dist_sync", "dmltrain-launch", "--kv-store local"]),
        (["--batch-size", "2000"], ["--batch-size 2000", "1437"]),
        (["--top-k", "11"], ["--top-k 11", "10 classes"]),
        (["--image-shape", "3,32,32"], ["3,32,32", "1,8,8"]),
        (["--val-image-shape", "1,12,12"], ["--val-image-shape 1,12,12", "digits cuts", "--random-crop 1"]),
        (["--random-crop", "--val-image-shape", "1,12,12"], ["1,12,12: mlp has other layers or weights"]),
        (["--image-shape", "1,6,6:0", "1,8,8:1"], ["--image-shape 1,6,6:0", "digits cuts"]),
        (["--random-crop", "--mean-img", "m.npy", "--val-image-shape", "1,12,12"], ["--mean-img has a single size"]),
        (["--random-crop", "--val-image-shape", "3,12,12"], ["3,12,12: expected 1 channel(s)"]),
        (["--dataset", "cifar10", "--data-dir", "/nonexistent"], ["/nonexistent"]),
        (
            ["--dataset", "cifar10", "--data-dir", "/nonexistent", "--sync-bn"],
            ["mlp has no batch norm: leave --sync-bn"],
        ),
        (["--data-train", "none", "--network", "convnext-t", "--stochastic-depth", "2"], ["--stochastic-depth is 2"]),
        (["--model-prefix", "/dev/null/m"], ["--model-prefix /dev/null/m"]),
        (["--model-prefix", "/nonexistent/m", "--load-epoch", "3"], ["/nonexistent"]),
        (["--backend", "mxnet", "--kv-store", "dist_sync"], ["dist_sync", "dmltrain-launch", "--kv-store local"]),
        (["--gc-type", "2bit", "--kv-store", "local"], ["--gc-type 2bit", "--kv-store local"]),
    ],
)
def test_a_mistake_is_explained(run, words, essentials):
    text = run(*words, code=2).text
    assert text.startswith("train: error: ") and text.count("\n") == 1
    for essential in essentials:
        assert essential in text


def test_checkpoints_that_do_not_fit(train, backend, tmp_path):
    words = ["--model-prefix", tmp_path / "m", "--num-epochs", 2]
    train("--num-epochs", 1, *words[:2])
    target = saved(tmp_path / "m", 1, backend)
    text = train(*words, "--load-epoch", 7, code=2).text
    assert "no checkpoint" in text and f"m-0007{target.suffix}" in text and target.name in text
    text = train(*words, "--load-epoch", 1, *RESNET, code=2).text
    assert "network 'mlp', expected 'resnet-8'" in text
    text = train(*words, "--load-epoch", 1, "--optimizer", "adam", code=2).text
    assert "optimizer 'sgd', expected 'adam'" in text
    target.write_bytes(target.read_bytes()[:-100])
    assert "damaged or truncated" in train(*words, "--load-epoch", 1, code=2).text


def test_last_skips_a_damaged_checkpoint_and_says_so(train, backend, tmp_path):
    words = ["--model-prefix", tmp_path / "m", "--num-epochs", 3]
    whole = train(*words)
    newest = saved(tmp_path / "m", 3, backend)
    newest.write_bytes(newest.read_bytes()[:-100])
    resumed = train(*words, "--load-epoch", "last")
    assert f"Skipped a damaged checkpoint: {newest}: the end of its " in resumed.text
    assert "Loaded checkpoint of epoch 2\n" in resumed.text
    assert resumed.results() == later(whole.results(), 2)
    for epoch in (1, 2, 3):
        saved(tmp_path / "m", epoch, backend).write_bytes(b"")
    again = train(*words, "--load-epoch", "last")
    assert again.text.count("Skipped a damaged checkpoint") == 3 and "m is whole: training starts from" in again.text
    assert again.results() == whole.results()


# -- processes --------------------------------------------------------------------------------------------------------


def environment(**more: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("DMLC_", "DMLTRAIN_"))}
    return {**clean, "PYTHONPATH": search_path(), "OMP_NUM_THREADS": "1", **more}


class Job(ForkedJob):
    """A scheduler, servers and workers of one program on this machine."""

    def text(self, index: int = 0) -> str:
        return self.output(f"worker-{index}")

    def log(self, worker: int = 0) -> Log:
        return Log(self.text(worker))


@contextmanager
def job(folder: Path, workers: int, servers: int, *command: object):
    made = Job(folder=folder, forker=forker("mxnet" if "mxnet" in command else "torch"))
    try:
        made.begin(command, workers, servers)
        yield made
    finally:
        made.kill()


def finished(folder: Path, workers: int, servers: int, *words: object) -> list[Log]:
    """The logs of all workers of a job that ends well."""
    with job(folder, workers, servers, EXAMPLES / "train_digits.py", *words) as running:
        running.succeed()
        return [running.log(worker) for worker in range(workers)]


def agree(logs: list[Log]) -> bool:
    """Whether all workers have the same weights at the end, and found the same accuracies with them."""
    found = [(log.digest(rank), log.values("Validation-accuracy", rank)) for rank, log in enumerate(logs)]
    return all(each == found[0] for each in found) and found[0][1] != []


RECIPE = ["--lr-policy", "cosine", "--warmup-epochs", 1, "--label-smoothing", 0.1, "--clip-gradient-norm", 0.3]
RECIPE += ["--ema-decay", 0.9]
SYNC = ["--kv-store", "dist_sync", "--batch-size", "32", "--num-examples", "300"]


# Smooth: rounding does not decide which values a ReLU passes.
NORMS = chain(
    *(Conv("conv0", 4, kernel=3, bias=False), BatchNorm("bn0"), Tanh("a0"), Conv("conv1", 4, kernel=3, bias=False)),
    *(BatchNorm("bn1", fixed_scale=False), Tanh("a1"), Flatten(), Dense("fc0", 10)),
)
SYNC_BN = ["--sync-bn", 1]


@pytest.mark.parametrize(
    ("workers", "backend", "words", "recipe"),
    [
        (2, "torch", [], []),
        pytest.param(2, "torch", [], RECIPE, marks=pytest.mark.thorough),
        (2, "torch", ["--devices", "cpu:2"], SYNC_BN),
        pytest.param(3, "torch", ["--update-on-kvstore", 1], SYNC_BN, marks=pytest.mark.thorough),
        # make test has test_mxnet_kvstore.py
        pytest.param(2, "mxnet", ["--update-on-kvstore", 0], [], marks=pytest.mark.thorough),
        pytest.param(2, "mxnet", ["--update-on-kvstore", 1], [], marks=pytest.mark.thorough),
    ],
)
def test_synchronous_workers_agree_and_resume_and_make_the_steps_of_one_process(
    tmp_path, run, workers, backend, words, recipe
):
    """257 samples over 2 workers and batches of 32: in the last step worker 0 has one sample, worker 1 none."""
    installed(backend)
    (tmp_path / "norms-symbol.json").write_bytes(write.graph(Network("norms", NORMS, (1, 8, 8), 10)))
    network = tmp_path / "norms-symbol.json" if recipe is SYNC_BN else "mlp"
    common = ["--backend", backend, "--network", network, "--num-examples", 257, "--num-epochs", 3, "--lr", 0.05]
    common += recipe
    sync = [*common, "--kv-store", "dist_sync", "--batch-size", 32, *words]
    sync += ["--model-prefix", tmp_path / "m", "--load-epoch", "last"]  # there is none yet
    first = finished(tmp_path / "first", workers, 2, *sync)
    assert agree(first)
    assert first[0].values("Train-accuracy", 0) != first[1].values("Train-accuracy", 1)
    assert all(int(value) > 4 * 17226 for value in first[0].values("Sent")) or recipe is SYNC_BN
    if backend == "mxnet":
        ranks = [re.search(rf"Worker {rank} is rank (\d) of MXNet's kvstore", first[rank].text)[1] for rank in (0, 1)]
        assert sorted(ranks) == ["0", "1"]
    run(*common, "--batch-size", 32 * workers, "--model-prefix", tmp_path / "one")
    two, one = (weights(saved(tmp_path / name, 3, backend)) for name in ("m", "one"))
    for name, value in one.items():
        assert np.abs(two[name] - value).max() / np.abs(value).max() < 1e-5, name

    for file in tmp_path.glob("m-0003.*"):  # also MXNet's own
        file.unlink()
    resumed = finished(tmp_path / "resumed", workers, 2, *sync)
    assert "Loaded checkpoint of epoch 2\n" in resumed[1].text
    for rank in range(workers):
        assert resumed[rank].results(rank) == later(first[rank].results(rank), 2)
    averages = {
        log.digest(rank, "Their average")
        for logs in (first, resumed)
        for rank, log in enumerate(logs)
        if recipe is RECIPE
    }
    assert len(averages) == len(first[0].values("Validation-average-accuracy")) / 3


def weights(path: Path) -> dict[str, np.ndarray]:
    if path.suffix == ".npz":
        from dmltrain.backends.mxnet import state as mxnet_state

        return mxnet_state.decode(path.read_bytes())["state"]["model"]
    import torch

    return {name: value.numpy() for name, value in torch.load(path, weights_only=True)["state"]["model"].items()}


@pytest.mark.thorough  # make test has them without training in kvstore/test_jobs.py and backends/test_mxnet_kvstore.py
@pytest.mark.parametrize(
    "line",
    [
        "--kv-store dist_async --swa-from 3",
        "--backend mxnet --kv-store dist_device_sync --devices cpu:2 --gc-type 2bit --gc-threshold 0.2",
    ],
)
def test_other_kvstores_learn(tmp_path, line):
    with_torch = "mxnet" not in line
    installed("torch" if with_torch else "mxnet")
    words = [*line.split(), "--network", "mlp", "--lr", 0.02, "--model-prefix", tmp_path / "m"]
    logs = finished(tmp_path / "job", 2, 1, *words, "--num-epochs", 5)
    assert float(logs[0].values("Validation-accuracy", 0)[-1]) > (0.75 if "2bit" in line else 0.85)
    assert agree(logs)
    assert len({log.digest(rank, "Their average") for rank, log in enumerate(logs) if with_torch}) == with_torch
    assert len(logs[0].values("Validation-average-accuracy", 0)) == 3 * with_torch
    assert bool(logs[0].values("Staleness")) == with_torch
    for node, log in enumerate(logs if with_torch else []):
        lines = re.findall(rf"Node\[{node}\] Epoch\[\d+\] Communication: (.*)", log.text)
        costs = [{name: float(value) for name, value in re.findall(r"(\S+)=(\S+)", line)} for line in lines]
        for each, cost in zip(costs, log.values("Time cost", node), strict=True):
            assert tuple(each) == record.COMMUNICATION
            assert 0 < each.pop("bound") <= 1 and sum(each.values()) >= float(cost) - 0.005, "the parts of the epoch"
    if with_torch:
        resumed = finished(tmp_path / "resumed", 2, 1, *words, "--num-epochs", 6, "--load-epoch", 5)
        assert float(resumed[0].values("Validation-accuracy", 0)[-1]) > 0.85


@pytest.mark.parametrize(("role", "backend"), [("scheduler", "torch"), ("server", "mxnet")])
def test_servers_that_are_not_needed_leave_at_once_without_a_framework(role, backend):
    program = (
        "import sys\nfrom dmltrain import fit\ntry:\n"
        f"    fit.main(['--kv-store', 'local', '--backend', '{backend}'], prog='train')\n"
        "except SystemExit as end:\n    print(end.code, sorted({'torch', 'mxnet'} & {*sys.modules}))"
    )
    variables = environment(DMLC_ROLE=role, DMLC_NUM_WORKER="1", DMLC_NUM_SERVER="1")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=variables)
    assert done.stdout == "0 []\n", done.stderr


def test_a_backend_works_where_the_other_framework_is_not_installed(backend, tmp_path):
    """`import torch` fails in this process, or `import mxnet`, as it does where it is not installed."""
    program = tmp_path / "train.py"
    program.write_text(WITHOUT.format({"torch": "mxnet", "mxnet": "torch"}[backend]))
    words = ["--backend", backend, "--num-epochs", 2, "--model-prefix", tmp_path / "m", "--load-epoch", "last"]
    code, text = run_forked(tmp_path, program, *words, environment=environment(), backend=backend)
    assert code == 0, text
    assert float(Log(text).values("Validation-accuracy")[1]) > 0.85
    assert saved(tmp_path / "m", 2, backend).exists()


WITHOUT = """
import sys
assert "{0}" not in sys.modules
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "{0}":
            raise ModuleNotFoundError("no module named {0}")
sys.meta_path.insert(0, Absent())
from dmltrain import fit
sys.exit(fit.main(prog="train", defaults={{"dataset": "digits", "network": "mlp", "kv_store": "local"}}))
"""


def test_a_mistake_that_only_workers_see_ends_the_whole_job(tmp_path):
    with job(tmp_path / "job", 2, 1, EXAMPLES / "train_digits.py", "--kv-store", "dist_sync", "--top-k", 11) as running:
        codes = running.wait()
        assert codes["worker-0"] == codes["worker-1"] == 2, running.text()
        assert "--top-k 11" in running.text() and "Traceback" not in running.text()


@pytest.mark.alone
def test_a_lost_server_ends_the_workers_with_75_and_no_traceback(tmp_path):
    with job(tmp_path / "job", 2, 1, EXAMPLES / "train_digits.py", *SYNC, "--num-epochs", 100000) as running:
        running.wait_for_line("worker-0", "Epoch[0] Validation-accuracy")
        running.processes["server-0"].kill()
        killed = time.monotonic()
        for rank in (0, 1):
            assert running.processes[f"worker-{rank}"].wait(15) == 75, running.text(rank)
            assert "train_digits.py: error: " in running.text(rank) and "Traceback" not in running.text(rank)
        assert time.monotonic() - killed < 10


def test_interrupted(tmp_path):
    words = ["--kv-store", "local", "--num-epochs", 100000]
    with job(tmp_path / "job", 1, 0, EXAMPLES / "train_digits.py", *words) as running:
        running.wait_for_line("worker-0", "Validation-accuracy")
        running.processes["worker-0"].send_signal(signal.SIGINT)
        assert running.processes["worker-0"].wait(120) == 130
        assert "train_digits.py: interrupted\n" in running.text() and "Traceback" not in running.text()


@pytest.mark.thorough
@pytest.mark.parametrize("data, words", [("mnist", []), ("cifar10", ["--num-layers", "8", "--batch-size", "64"])])
def test_real_data(real_data, tmp_path, data, words):
    words = ["--kv-store", "local", "--data-dir", real_data / data, "--num-examples", 1280, "--num-epochs", 1, *words]
    words += ["--num-val-examples", 500]
    code, text = run_forked(tmp_path, EXAMPLES / f"train_{data}.py", *words, environment=environment())
    assert code == 0, text
    assert float(Log(text).values("Train-accuracy")[0]) > 0.15
    assert "1280 training and 500 validation samples" in text


def test_a_worker_for_which_a_job_has_ended_before_it_trains_ends_well(capsys):
    def late():
        raise MembershipEnded(JOB_ENDED)

    assert fit.exit_code("train.py", late) == 0
    assert capsys.readouterr().err == "train.py: this worker's part has ended: the job has come to its end\n"
