"""benchmarks/accuracy.py makes each run once, and compares."""

import shutil

import pytest

from tests.benchmarks.as_a_user import called, figures

pytest.importorskip("torch", reason="PyTorch is not installed")


@pytest.mark.thorough
def test_a_run_is_made_once_and_compared(tmp_path):
    words = f"accuracy.py --log-dir {tmp_path} --gc-type int8 --seeds 1 --epochs 1 --num-examples 128"
    result = figures(words)["types"]["int8"]
    assert 0 <= result["last"][0] <= 100
    assert 0.2 < result["megabytes"] < 0.6  # 1.1 MB of float32, a quarter of it and the batch norm's statistics
    log = tmp_path / "int8-seed1/worker-0.log"
    assert "--gc-type int8" in log.read_text()
    before = log.stat().st_mtime_ns
    shutil.copytree(log.parent, tmp_path / "none-seed1")
    again = called(f"{words} --gc-type none,int8")
    assert again.returncode == 0 and log.stat().st_mtime_ns == before
    assert [line.split("|")[1].strip() for line in again.stdout.splitlines()[2:]] == ["none", "int8"]
    assert "| +0.00 |" in again.stdout.splitlines()[3]
