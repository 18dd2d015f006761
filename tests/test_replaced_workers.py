"""Replacements of lost workers in real elastic jobs: all samples once, and the weights of the replay."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dmltrain.audit.count import count
from dmltrain.audit.views_file import read
from tests.elastic_job import AUDIT, KILLED, each_sample_once, make_forker, make_jobs  # noqa: F401

ROOT = Path(__file__).parents[1]
LOST = "1:before:complete:4:kill"
THREE = ["--num-epochs", "3"]


def until_invited(rank, step, times=1):
    """This worker, which leads, waits before this step for who wants to join."""
    return f"{rank}:before:train_step:{step}:until/after/invite/{times}"


def replace(job, member, number, *words, faults=""):
    """Start replacement `number` of this worker, when the one before it has ended."""
    before = f"worker-{member}-{number - 1}" if number > 1 else f"worker-{member}"
    job.processes[before].wait(120.0)
    (python, program, _, *options), environment = job.commands[f"worker-{member}"]
    name = f"worker-{member}-{number}"
    job.commands[name] = ([python, program, faults, *options, *words], {**environment, "DMLTRAIN_JOIN": "1"})
    job.processes[name] = job.start(name)
    return name


def digests(job):
    return {found for name in job.processes for found in re.findall(r"weights sha256=(\w+)", job.output(name))}


def ended(job, killed):
    """These were killed; the others have the same weights, and each sample was used once in each epoch."""
    codes = job.wait()
    assert codes == {name: KILLED if name in killed else 0 for name in codes}, job.outputs()
    assert len(digests(job)) == 1, job.outputs()
    each_sample_once(job)
    return read(job.folder / "audit/views.json").views


def replayed(jobs, job, *options, **more):
    """The replay has the same weights."""
    replay = jobs.start("", *options, "--replay", job.folder / "audit/views.json", **more)
    replay.succeed()
    assert digests(replay) == digests(job), replay.outputs()


@pytest.mark.thorough
def test_workers_are_replaced_twice_and_a_replay_has_the_same_weights(jobs):
    faults = ",".join([LOST, until_invited(0, 6), until_invited(0, 20, times=2)])
    job = jobs.start(faults, *THREE, *AUDIT, workers=3)
    first = replace(job, 1, 1, faults=LOST)
    second = replace(job, 1, 2)
    views = ended(job, {"worker-1", first})
    assert "Final weights" in job.output(second)
    assert [view.joined for view in views] == [(), (), (1,), (), (1,)]
    replayed(jobs, job, *THREE, workers=3, servers=1)


@pytest.mark.thorough
def test_a_replacement_begins_without_residuals(jobs):
    """In a replay, too, where the worker is the same process as before."""
    options, shape = ["--gc-type", "int8"], {"workers": 3, "servers": 1}
    job = jobs.start(f"{LOST},{until_invited(0, 6)}", *options, *AUDIT, **shape)
    replace(job, 1, 1)
    views = ended(job, {"worker-1"})
    assert [view.joined for view in views] == [(), (), (1,)]
    replayed(jobs, job, *options, **shape)


@pytest.mark.thorough
def test_the_leader_is_replaced(jobs):
    """Its files of the audit, and the list of all views, go on."""
    job = jobs.start(f"0:before:complete:4:kill,{until_invited(1, 6)}", *AUDIT, workers=2, servers=1)
    name = replace(job, 0, 1)
    views = ended(job, {"worker-0"})
    assert "New in view 3: workers 0\n" in job.output("worker-1") and "Final weights" in job.output(name)
    assert [view.members for view in views] == [(0, 1), (1,), (0, 1)]


@pytest.mark.thorough
def test_a_replacement_with_another_learning_rate_is_refused(jobs):
    job = jobs.start(f"{LOST},{until_invited(0, 6)}", *AUDIT, workers=2, servers=1)
    name = replace(job, 1, 1, "--lr", "0.5")
    assert job.processes[name].wait(60.0) == 75, job.outputs()
    assert "did not join the job: worker 1 on" in job.output(name)
    assert "is not like the job's other workers: lr 0.5 (the job: 0.1)" in job.output(name)
    replace(job, 1, 2)
    codes = job.wait()
    assert codes == {each: 75 if each == name else KILLED if each == "worker-1" else 0 for each in codes}, job.outputs()
    each_sample_once(job)


@pytest.mark.thorough
def test_the_launcher_replaces_a_worker_of_a_real_training(tmp_path):
    program = Path(__file__).parent / "programs/dies_once.py"
    launch = ["--launcher", "local", "-n", "3", "-s", "1", "--elastic", "--restart-workers", "1"]
    words = [
        "--kv-store",
        "dist_sync",
        "--batch-size",
        "16",
        "--emulate-step",
        "0.1",
        "--audit",
        str(tmp_path / "audit"),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "launch.cli", *launch, "--log-dir", str(tmp_path / "logs"), str(program), *words],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "starting the replacement of worker 1 on" in done.stderr + done.stdout
    logs = [(tmp_path / f"logs/worker-{rank}.log").read_text() for rank in range(3)]
    assert "New in view 3: workers 1\n" in logs[0] and "Removed from the job: worker 1 on" in logs[0]
    assert len({re.search(r"Final weights sha256=(\w+)", text)[1] for text in logs}) == 1
    found = count(tmp_path / "audit")
    assert found.problems == () and all((times == 1).all() for times in found.times.values())
