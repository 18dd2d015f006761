"""benchmarks/first_minutes.py: each of its stages runs, on a CUDA device that is none."""

import functools
import json

import pytest

from tests.benchmarks.as_a_user import benchmark_module, called, figures
from tests.device import fake_cuda
from tests.forked_job import FAKE_CUDA

pytest.importorskip("torch", reason="benchmarks compare with torch")


@pytest.mark.thorough
def test_all_stages_run(tmp_path):
    try:
        fake_cuda.library()
    except fake_cuda.NotHere as reason:
        pytest.skip(str(reason))
    how = functools.partial(called, backend=FAKE_CUDA)
    result = figures("first_minutes.py --small --out", tmp_path, how=how)
    stages, tables = benchmark_module("gpu.stages").STAGES, benchmark_module("tables.gpu")
    rows = result["rows"]
    assert tables.missed(rows) == [] and {row["stage"] for row in rows if "seconds" in row} == set(stages)
    with_figures = {key for row in rows for key in row} & set(tables.TITLES)
    assert with_figures == set(tables.TITLES)
    assert [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()][0]["gpu"]
    assert "- reached: mlp: one step is within 0.0001" in tables.table(result)


def test_a_missed_bar_and_a_stage_that_failed_are_told():
    tables = benchmark_module("tables.gpu")
    rows = [
        {"stage": "speed", "bar": "fast", "value": 0.9, "least": 0.95},
        {"stage": "speed", "bar": "small", "value": 0.9, "least": None},
        {"stage": "jobs", "failed": "skipped"},
    ]
    assert tables.missed(rows) == ["jobs: skipped", "fast"]


def test_a_stage_is_ended_when_its_time_is_over(tmp_path):
    running = benchmark_module("gpu.running")
    command = ["sh", "-c", """echo 'RESULT {"rate": 1}'; exec sleep 100"""]
    rows = running.run_stage("machine", command, 0.5, tmp_path)
    assert rows[0] == {"stage": "machine", "rate": 1} and "its 0.5 s were over" in rows[1]["failed"]
