"""The examples for Lightning, Accelerate and Transformers, each once in a job with servers."""

import importlib.util
import json
from pathlib import Path

import pytest

from dmltrain.audit.count_draws import count
from tests.forked_job import forked
from tests.launch.conftest import ROOT, launcher  # noqa: F401  (a fixture)

PROGRAM = Path(__file__).parent / "programs/adapters.py"
SLOW_IMPORTS = ("lightning", "accelerate", "transformers.trainer")  # once for all processes
IMPORTED = tuple(name for name in SLOW_IMPORTS if importlib.util.find_spec(name.partition(".")[0]))


@pytest.fixture
def facts(launcher):  # noqa: F811
    """`facts(framework)` -> what each of two workers has said, when the job has ended with exit code 0."""

    def facts(framework):
        pytest.importorskip(framework)
        example = ROOT / f"examples/{framework}_digits.py"
        done = launcher.run("-n", 2, "-s", 2, *forked(PROGRAM, example, modules=IMPORTED))
        assert done.code == 0, done
        lines = [launcher.log(f"worker-{rank}").decode().splitlines() for rank in range(2)]
        return [json.loads(line[6:]) for each in lines for line in each if line.startswith("facts ")]

    return facts


def test_lightning(facts):
    first, second = facts("lightning")
    assert first == second, "weights, and what validation has found on both"
    assert first["stopped"] and first["checkpoint"] and first["dealt"] == 2
    assert first["accuracy"] > 0.9
    assert first["bytes"] > 100_000 * 20, "more than 20 steps"


def test_accelerate(facts):
    first, second = facts("accelerate")
    assert first == second
    assert first["restored"] and first["dealt"] == 2
    assert first["bytes"] > 150_000 * 5 * 20


def test_transformers_and_the_audit_of_a_run_that_goes_on_in_the_middle_of_an_epoch(facts, tmp_path):
    first, second = facts("transformers")
    assert first == second
    assert first["dealt"] == 2 and first["accuracy"] > 0.9
    assert first["bytes"] > 150_000 * 4 * 20
    counted = count(tmp_path / "audit")
    assert counted.problems == ()
    assert counted.rows[0] == "start 2 went on in epoch 0 with batch 11"
    assert [row.partition(", but")[0] for row in counted.rows[1:]] == [
        f"epoch {epoch}: 1437 of 1437 samples used, each once" for epoch in range(2)
    ]
