"""benchmarks/accuracy.py trains with every codec once, and compares."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
BENCHMARK = Path(__file__).parents[2] / "benchmarks/accuracy.py"


def run(folder, *words):
    return subprocess.run([sys.executable, str(BENCHMARK), "--log-dir", str(folder), *words], capture_output=True,
                          text=True, timeout=200)


def test_every_codec_is_trained_and_what_is_there_is_not_trained_again(tmp_path):
    words = ["--gc-type", "none,int8", "--seeds", "1", "--epochs", "1", "--num-examples", "128"]
    done = run(tmp_path, *words, "--format", "json")
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert set(results) == {"none", "int8"}
    assert all(0 <= result["last"][0] <= 100 for result in results.values())
    assert results["int8"]["megabytes"] < 0.5 * results["none"]["megabytes"]
    log = tmp_path / "int8-seed1/worker-0.log"
    assert "--gc-type int8" in log.read_text()
    before = log.stat().st_mtime_ns
    again = run(tmp_path, *words)
    assert again.returncode == 0 and log.stat().st_mtime_ns == before
    assert [line.split("|")[1].strip() for line in again.stdout.splitlines()[2:]] == ["none", "int8"]


def test_a_type_that_is_none_is_refused(tmp_path):
    done = run(tmp_path, "--gc-type", "none,zip")
    assert done.returncode == 2 and "--gc-type 'zip': choose of none, bf16" in done.stderr
