"""How fast logs are read, and that their size costs no memory. The figures are those of benchmarks/logs.py."""

import json

import pytest

from tests.benchmarks.as_a_user import run

# CPU seconds a MB: half of 30 MB/s, because other programs of a busy machine slow this one down
MOST_CPU_SECONDS = 1 / 15
MOST_MEMORY = 16  # MiB


@pytest.mark.alone
@pytest.mark.thorough
@pytest.mark.parametrize("name", ["dmltrain", "MXNet", "Caffe", "PMLS-Caffe", "Keras", "PyTorch Lightning"])
def test_logs_are_read_fast_in_constant_memory(name: str) -> None:
    done = run("logs.py", "--megabytes", "20", "--repeats", "1", "--only", name, "--format", "json")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)["logs"][name]
    assert figures["rows"] == 100 and figures["megabytes"] > 15
    assert figures["cpu_seconds_per_megabyte"] < MOST_CPU_SECONDS
    assert figures["grown_mib"] < MOST_MEMORY
