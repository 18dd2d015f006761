"""The examples for Lightning, Accelerate, Transformers and Ray Train, each once in a job with servers."""

import ast
import importlib.util
import json
import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from dmltrain.audit.count_draws import count
from tests.backends.test_torch_backend import IN_PLACE, environment, meeting
from tests.cluster import ray_cluster
from tests.copied_tree import search_path
from tests.forked_job import forked
from tests.launch.conftest import ROOT, carriers, launcher  # noqa: F401  (a fixture)
from tests.waiting import wait_for

pytestmark = pytest.mark.thorough
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


ON_ANY_DEVICE = """
import accelerate, torch
accelerator = accelerate.Accelerator()
total = accelerator.reduce(torch.ones(100_000), "sum")
print(accelerator.num_processes, int(total[0]), torch.distributed.get_backend())
"""


def test_a_script_of_accelerate_that_does_not_ask_for_cpus_trains_together_without_a_gpu(start_forked, tmp_path):
    pytest.importorskip("accelerate")
    (script := tmp_path / "train.py").write_text(ON_ANY_DEVICE)
    store = meeting()
    ranks = {f"worker-{rank}": environment(store, rank) for rank in range(2)}
    job = start_forked(IN_PLACE, script, modules=IMPORTED, servers=1, place=lambda name: ([], ranks.get(name, {})))
    job.succeed()
    assert all("2 2 dmltrain" in job.output(f"worker-{rank}").splitlines() for rank in range(2)), job.outputs()


def test_ray_train(tmp_path):
    pytest.importorskip("ray.train")
    mark, program = secrets.token_hex(8), ROOT / "examples/ray_digits.py"
    own = {**os.environ, **ray_cluster.SETTINGS, "RAY_worker_niceness": "0", "PYTHONPATH": search_path()}
    own |= {"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "240", "OMP_NUM_THREADS": "1", "TEST_MARK": mark}
    said = subprocess.run([sys.executable, program], env=own, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert said.returncode == 0, said.stdout + said.stderr
    (metrics,) = (ast.literal_eval(line[8:]) for line in said.stdout.splitlines() if line.startswith("metrics "))
    assert metrics["accuracy"] > 0.9 and metrics["bytes"] > 1_000_000 * 3 * 22, "three epochs of 22 steps"
    wait_for(lambda: not carriers(f"TEST_MARK={mark}"), "the end of Ray and of the servers beside its workers")
