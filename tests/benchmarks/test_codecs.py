"""benchmarks/codecs.py measures every type, alone and side by side."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks/codecs.py"


@pytest.mark.parametrize("processes", ["1", "2"])
def test_every_type_has_its_figures(processes):
    command = [sys.executable, str(BENCHMARK), "--megabytes", "4", "--repeats", "1", "--processes", processes]
    done = subprocess.run([*command, "--format", "json"], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    figures = result["gigabytes_per_cpu_second"]
    assert set(figures) == {"memcpy", "bf16", "fp16", "int8", "2bit", "topk"}
    for name, columns in figures.items():
        assert set(columns) >= {"decode", "add"} and ("encode" in columns) == (name != "memcpy")
        assert all(0 < figure < 1000 for figure in columns.values())
    assert result["bytes_to_float32"]["2bit"] == pytest.approx(17 / 256, rel=0.01)
