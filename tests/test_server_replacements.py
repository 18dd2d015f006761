"""Elastic jobs of real processes whose lost servers are replaced, and the replays of them without a loss."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dmltrain.audit.count import count
from dmltrain.audit.views_file import read
from tests.elastic_job import (  # noqa: F401
    AUDIT,
    come,
    come_server,
    digests,
    each_sample_once,
    make_forker,
    make_jobs,
    newest_server,
    replace_schedulers,
    replace_servers,
)

thorough = pytest.mark.thorough

# Ops as in test_elastic.py: in each epoch 7 rounds, two barriers, comparison of weights, save, validation.
IN_ROUND_5 = "1:after:pushpull:9:server/1"
UNTIL_INVITED = "0:before:train_step:{}:until/after/invite/{}"  # worker 0 leads, and waits for who wants to join


def servers(job):
    """Of each view: the servers, and those that are new."""
    return [(view.servers, view.joined_servers) for view in read(job.folder / "audit/views.json").views]


REPLACED = [((0, 1), ()), ((0,), ()), ((0, 1), (1,))]


def test_a_killed_server_is_replaced(jobs):
    job = jobs.survives(f"{IN_ROUND_5},{UNTIL_INVITED.format(7, 1)}", lost=set(), servers_come=(1,), workers=3)
    assert servers(job) == REPLACED
    assert "New in view 3: servers 1" in job.output("worker-2")
    assert "was lost: end of stream; the job goes on without it" in job.output("scheduler-0")


@thorough
@pytest.mark.parametrize(
    ("options", "environment"),
    [
        (["--gc-type", "fp16"], {"DMLTRAIN_TRANSPORT": "tcp"}),
        (["--gc-type", "bf16"], {"DMLTRAIN_TRANSPORT": "shm"}),
        (["--network", "resnet", "--num-layers", 8], {"DMLTRAIN_WIRE": "auth", "DMLTRAIN_TRANSPORT": "tcp"}),
    ],
    ids=["fp16", "bf16", "auth"],
)
def test_each_type_and_transport(jobs, options, environment):
    faults = f"{IN_ROUND_5},{UNTIL_INVITED.format(7, 1)}"
    job = jobs.survives(faults, *options, lost=set(), servers_come=(1,), workers=3, env=environment)
    assert servers(job) == REPLACED


@thorough
def test_it_is_killed_twice(jobs):
    faults = [IN_ROUND_5, UNTIL_INVITED.format(7, 1), "2:after:complete:9:server/1", UNTIL_INVITED.format(12, 2)]
    job = jobs.survives(",".join(faults), lost=set(), servers_come=(1, 1), workers=3)
    assert servers(job) == [*REPLACED, *REPLACED[1:]]


@thorough
@pytest.mark.parametrize("moment", ["before:announce:3", "after:announce:3", "after:enter:3"])
def test_the_replacement_is_killed_while_it_joins(jobs, moment):
    """Some of the workers cannot connect to it then, and wait for the view without it."""
    faults = [IN_ROUND_5, UNTIL_INVITED.format(7, 1), f"1:{moment}:server/1", UNTIL_INVITED.format(12, 2)]
    job = jobs.survives(",".join(faults), lost=set(), servers_come=(1, 1), workers=3)
    assert servers(job) == [*REPLACED, *REPLACED[1:]]


@thorough
def test_it_is_killed_together_with_a_worker(jobs):
    """The replacement joins before the worker is removed, after that, or with the same view."""
    faults = [IN_ROUND_5, "2:before:complete:5:kill", "0:before:train_step:9:until/after/newcomer/1"]
    job = jobs.survives(",".join(faults), lost={2}, servers_come=(1,), workers=3)
    views = servers(job)
    assert REPLACED[-1] in views and views[-1][0] == (0, 1)


LAST = {
    "between two pushes": "1:after:pushpull:7:server/0",
    "with values that nobody has recognised": "1:before:complete:4:server/0",
    "in a barrier": "0:before:barrier:2:server/0",
    "in validation": "1:before:evaluate:12:server/0",
    "in the middle of the checkpoint": "0:before:put:2:server/0",
}


@thorough
@pytest.mark.parametrize("fault", LAST.values(), ids=LAST)
def test_without_any_server_the_job_waits_for_one(jobs, fault):
    job = jobs.survives(fault, lost=set(), servers_come=(0,), workers=3, servers=1)
    assert servers(job) == [((0,), ()), ((0,), (0,))]
    assert "no server is left, and the job waits for a replacement" in job.output("scheduler-0")


@thorough
def test_who_lacks_the_results_of_the_last_server_gets_the_weights_from_another(jobs):
    waits = ",".join(f"{member}:before:complete:4:until/after/freeze/1" for member in (1, 2))
    job = jobs.survives(f"0:after:complete:4:server/0,{waits}", lost=set(), servers_come=(0,), workers=3, servers=1)
    assert [view.behind for view in read(job.folder / "audit/views.json").views] == [(), (1, 2)]


@thorough
def test_both_servers_are_killed_and_one_comes_back(jobs):
    faults = "1:after:pushpull:8:server/0,2:after:pushpull:8:server/1"
    job = jobs.survives(faults, lost=set(), servers_lost=(0,), servers_come=(1,), workers=3)
    assert servers(job)[-1][0] == (1,)


@thorough
def test_the_next_scheduler_and_who_comes_later_know_where_a_replacement_is(jobs):
    """The scheduler is killed after the server's replacement has joined; then a worker comes, and another is killed."""
    faults = [IN_ROUND_5, UNTIL_INVITED.format(7, 1), "1:before:train_step:10:scheduler"]
    faults += [UNTIL_INVITED.format(13, 2), "2:before:complete:19:kill"]
    environment = {"DMLTRAIN_SCHEDULER_FILE": "scheduler.json", "DMLTRAIN_MAX_WORKERS": "4"}
    environment |= {"DMLTRAIN_RESTART_SERVERS": "1"}
    job = jobs.start(",".join(faults), *AUDIT, workers=3, env=environment)
    replace_servers(job, (1,))
    replace_schedulers(job, 1)
    job.wait_for_line("scheduler-0-2", "goes on after view 3")
    come(job, 3)
    codes = job.wait()
    killed = {"scheduler-0": -9, "server-1": -9, "worker-2": -9}
    assert codes == dict.fromkeys(codes, 0) | killed, job.outputs()
    each_sample_once(job)
    assert len(digests(job, (0, 1, 3))) == 1


@thorough
def test_a_replacement_that_waits_at_the_end_ends_with_the_job(jobs):
    end = "0:before:close:1:until/after/newcomer/1"
    job = jobs.start(end, *AUDIT, workers=2, env={"DMLTRAIN_RESTART_SERVERS": "1"})
    job.wait_for_line("worker-0", "View 1 after op 0")
    job.processes["server-1"].kill()
    job.processes["server-1"].wait()
    job.wait_for_line("worker-0", "Final weights")
    come_server(job, 1)
    codes = job.wait()
    assert codes == dict.fromkeys(codes, 0) | {"server-1": -9}, job.outputs()
    assert newest_server(job, 1) == "server-1-2" and servers(job) == REPLACED[:2]


@thorough
@pytest.mark.parametrize("number", [1, 2])
def test_the_launcher_replaces_a_server_of_a_real_training(tmp_path, number):
    """One of two, or the only one."""
    program = Path(__file__).parent / "programs/server_dies_once.py"
    launch = ["--launcher", "local", "-n", "3", "-s", str(number), "--elastic", "--restart-servers", "1"]
    words = ["--kv-store", "dist_sync", "--batch-size", "16", "--emulate-step", "0.1", "--audit", tmp_path / "audit"]
    done = subprocess.run(
        [sys.executable, "-m", "launch.cli", *launch, "--log-dir", tmp_path / "logs", program, *words],
        capture_output=True,
        text=True,
        timeout=250,
        env={
            **os.environ,
            "PYTHONPATH": str(Path(__file__).parents[1]),
            "OMP_NUM_THREADS": "1",
            "PID": str(tmp_path / "pid"),
        },
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "starting the replacement of server 0 on" in done.stderr + done.stdout
    logs = [(tmp_path / f"logs/worker-{rank}.log").read_text() for rank in range(3)]
    assert re.search(r"New in view \d: servers 0\n", logs[0]) and "Removed from the job: server 0 on" in logs[0]
    assert len({re.search(r"Final weights sha256=(\w+)", text)[1] for text in logs}) == 1
    assert read(tmp_path / "audit/views.json").views[-1].servers == tuple(range(number))
    found = count(tmp_path / "audit")
    assert found.problems == () and all((times == 1).all() for times in found.times.values())
