"""Elastic jobs of real processes, which lose servers at exact moments, and the replays of them without a loss."""

import signal

import pytest

from dmltrain.audit.views_file import read
from tests.elastic_job import AUDIT, digests, make_forker, make_jobs  # noqa: F401  (fixtures)

thorough = pytest.mark.thorough

# Ops as in test_elastic.py: in each epoch 7 rounds, two barriers, comparison of weights, save, validation.
MOMENTS = {
    "before the first push": "0:before:pushpull:1:server/1",
    "in the forward pass": "1:before:train_step:3:server/1",
    "between two pushes": "1:after:pushpull:7:server/1",
    "between push and value": "1:after:pushpull:9:server/1",
    "with values that nobody has recognised": "1:before:complete:4:server/1",
    "after a round": "1:after:complete:3:server/1",
    "in the last round of an epoch": "1:before:pushpull:21:server/1",
    "in a barrier": "3:before:barrier:2:server/1",
    "in validation": "1:before:evaluate:5:server/1",
    "in the sum of validation": "1:before:wait:50:server/1",
    "before the checkpoint": "0:before:write:1:server/1",
    "in the middle of the checkpoint": "0:before:put:2:server/1",
    "in the last op": "2:before:complete:24:server/1",
}


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(each, id=name, marks=[] if name == "between push and value" else thorough)
        for name, each in MOMENTS.items()
    ],
)
def test_a_server_is_killed(jobs, fault):
    jobs.survives(fault, servers_lost=(1,), late="complete:24" in fault)


WAITS = "{}:before:complete:4:until/after/freeze/1"  # this worker does not recognise what it has


def behind(job):
    return [view.behind for view in read(job.folder / "audit/views.json").views if view.behind]


@pytest.mark.parametrize("options", [(), pytest.param(["--network", "resnet", "--num-layers", 8], marks=thorough)])
def test_who_lacks_the_results_of_the_lost_server_gets_the_weights_from_another(jobs, options):
    """Worker 0 holds op 4 when it kills the server, the others do not."""
    faults = ",".join(["0:after:complete:4:server/1", *(WAITS.format(member) for member in (1, 2))])
    job = jobs.survives(faults, *options, lost=set(), servers_lost=(1,), workers=3)
    assert behind(job) == [(1, 2)]
    assert "The step of this worker was made by the others" in job.output("worker-2")


@thorough
def test_who_holds_the_last_round_of_an_epoch_alone_gives_its_step_to_the_others(jobs):
    """It waits in the barrier that follows."""
    waits = ",".join(f"{member}:before:complete:7:until/after/freeze/1" for member in (1, 2))
    job = jobs.survives(f"0:after:complete:7:server/0,{waits}", lost=set(), servers_lost=(0,), workers=3)
    assert behind(job) == [(1, 2)]


@thorough
def test_a_worker_that_is_behind_dies_before_it_has_the_step(jobs):
    faults = ",".join(["0:after:complete:4:server/1", *(WAITS.format(member) for member in (1, 2))])
    job = jobs.survives(f"{faults},2:before:enter:1:kill", lost={2}, servers_lost=(1,), workers=4)
    assert behind(job) == [(1, 2)] or behind(job) == [(1, 2, 3)] or behind(job) == [(1, 2), (1,)]


TOGETHER = {
    "a worker kills one and itself": ("1:before:complete:4:server/1,1:before:complete:5:kill", {1}, (1,)),
    "worker and server in one round": ("1:after:pushpull:8:server/0,2:before:complete:3:kill", {2}, (0,)),
    "the leader and a server": ("0:before:complete:4:kill,3:before:complete:4:server/0", {0}, (0,)),
    "all but one": ("1:after:pushpull:8:server/0,2:before:complete:5:server/2", set(), (0, 2)),
    "all but one at once": ("1:after:pushpull:8:server/0,2:after:pushpull:8:server/2", set(), (0, 2)),
}


@thorough
@pytest.mark.parametrize(("faults", "lost", "servers"), TOGETHER.values(), ids=TOGETHER)
def test_several_are_killed(jobs, faults, lost, servers):
    jobs.survives(faults, lost=lost, servers_lost=servers, servers=3)


WHILE_THE_VIEW_CHANGES = {
    "before its answer": "before:freeze:1",
    "after its answer": "after:freeze:1",
    "before it has the view": "before:announce:2",
    "with a view that it has not entered": "after:announce:2",
    "before it enters": "before:enter:1",
    "after it has entered": "after:enter:2",
}


@thorough
@pytest.mark.parametrize(
    "first", ["1:before:complete:4:kill", "1:before:complete:4:server/0"], ids=["worker", "server"]
)
@pytest.mark.parametrize("moment", WHILE_THE_VIEW_CHANGES.values(), ids=WHILE_THE_VIEW_CHANGES)
def test_a_server_is_killed_while_the_view_changes(jobs, moment, first):
    servers = (1,) if first.endswith("kill") else (0, 1)
    lost = {1} if first.endswith("kill") else set()
    jobs.survives(f"{first},2:{moment}:server/1", lost=lost, servers_lost=servers, servers=3)


@thorough
@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_each_transport(jobs, transport):
    jobs.survives("1:after:pushpull:8:server/1", servers_lost=(1,), env={"DMLTRAIN_TRANSPORT": transport}, workers=3)


def test_without_any_server_the_job_ends_and_says_so(jobs):
    job = jobs.start("1:before:complete:4:server/0", workers=2, servers=1)
    codes = job.wait()
    assert codes == {"scheduler-0": 75, "server-0": -9, "worker-0": 75, "worker-1": 75}, job.outputs()
    for name in ("scheduler-0", "worker-0"):
        assert "was lost: end of stream; no server is left" in job.output(name)
    assert "Traceback" not in job.outputs()


@thorough
def test_a_stopped_server_is_removed_and_says_so_when_it_goes_on(jobs):
    job = jobs.start("1:before:complete:4:stop server/1", *AUDIT, env={"DMLTRAIN_HEARTBEAT_TIMEOUT": "3"})
    job.wait_for_line("worker-0", "Removed from the job: server 1")
    job.processes["server-1"].send_signal(signal.SIGCONT)
    codes = job.wait()
    assert codes.pop("server-1") == 75 and set(codes.values()) == {0}, job.outputs()
    assert len(digests(job, range(4))) == 1
