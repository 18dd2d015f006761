"""Programs that know nothing of dmltrain, under dmltrain-launch: MXNet's real store, servers and scheduler."""

import importlib.util
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"
PTH = ROOT / "dmltrain/backends/mxnet/dmltrain_mxnet.pth"

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mxnet") is None, reason="mxnet is not installed: pip install 'dmltrain[mxnet]'"
)


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> str:
    """An interpreter as `pip install 'dmltrain[mxnet]'` makes it: what is installed here, and this dmltrain's .pth."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    (site / "a.pth").write_text(f"{ROOT}\n{sysconfig.get_path('purelib')}\n")
    (site / PTH.name).write_text(PTH.read_text())
    return str(folder / "bin/python")


@pytest.fixture
def run(launcher, python):
    """Runs a program in a job. The launcher's environment has no PYTHONPATH for it."""

    def launch(name: str, *words: str, settings: dict[str, str] | None = None, workers: int = 2, servers: int = 1):
        settings = {"OMP_NUM_THREADS": "1", **(settings or {})}
        env = [word for pair in settings.items() for word in ("--env", "=".join(pair))]
        return launcher.run("--launcher", "local", "-n", workers, "-s", servers, *env, python, PROGRAMS / name, *words)

    return launch


@pytest.mark.thorough
def test_the_store_of_mxnets_own_tests_and_two_bits_as_its_nightly_tests_check_them(run, launcher):
    """The latter with each pull awaited before the next push, which those tests forget."""
    result = run("mxnet_kvstore.py", settings={"MXNET_KVSTORE_BIGARRAY_BOUND": "1000"}, servers=2)
    assert result.code == 0, result
    assert "0 processes left" in result.err
    ranks = set()
    for index in range(2):
        said = launcher.log(f"worker-{index}").decode()
        found = re.search(r"rank (\d) of 2, worker (\d): all equal", said)
        assert found and found[2] == str(index), said  # the log's name is the launcher's index, whatever kv.rank is
        ranks.add(found[1])
    assert ranks == {"0", "1"}


@pytest.mark.thorough
def test_the_documentations_late_pull_is_late(run, launcher, tmp_path):
    (program,) = re.findall(r"^```python\n(# late_pull\.py.*?)^```", (ROOT / "docs/mxnet.md").read_text(), re.M | re.S)
    (tmp_path / "late_pull.py").write_text(program)
    result = run(str(tmp_path / "late_pull.py"), workers=1)
    assert result.code == 0, result
    found = launcher.log("worker-0").decode()
    assert "after the second push: 2.0" in found and "before the second push: 2.0 where 1.0 is due" in found, found


@pytest.mark.thorough
def test_a_gluon_trainer(run, launcher):
    result = run("mxnet_gluon.py")
    assert result.code == 0, result
    said = [launcher.log(f"worker-{index}").decode().split() for index in range(2)]
    assert said[0] == said[1], "the workers' weights differ"
    assert float(said[0][0].removeprefix("accuracy=")) > 0.9, said
    codes = [row["exit_code"] for row in launcher.record["processes"]]
    assert codes[-2:] == [0, 0] and {*codes} <= {0, 143}, "servers are ended half a second after the workers"


def test_module_fit_and_its_table(run, launcher):
    """One step of the other worker may always come in between, so a worker's last accuracy is not its best."""
    result = run("mxnet_module.py", "--kv-store", "dist_async", "--num-epochs", "10")
    assert result.code == 0, result
    for index in range(2):
        accuracy = re.findall(r"Validation-accuracy=([\d.]+)", launcher.log(f"worker-{index}").decode())
        assert len(accuracy) == 10 and max(map(float, accuracy)) > 0.8, accuracy
    assert "| train-accuracy | val-accuracy |" in result.out.decode(), result  # the launcher reads MXNet's lines


@pytest.mark.thorough
def test_a_failing_worker_ends_all(run, launcher):
    """MXNet's store alone would hold it in a barrier at its exit, for ever."""
    result = run("mxnet_module.py", "--kv-store", "dist_sync", "--fail", "1")
    assert result.code == 1, result
    assert "RuntimeError: this worker is to fail" in result.err
    assert "0 processes left" in result.err
