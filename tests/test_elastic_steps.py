"""Elastic jobs whose optimizer runs on the servers, which lose workers and servers at exact moments."""

import re

import pytest

from dmltrain.audit.views_file import read
from tests.elastic_job import (  # noqa: F401
    AUDIT,
    KILLED,
    PREFIX,
    come,
    digests,
    each_sample_once,
    make_forker,
    make_jobs,
    ranks,
    replace_servers,
)
from tests.test_elastic import cases

thorough = pytest.mark.thorough
ON_SERVERS = ["--update-on-kvstore", "1", "--mom", "0.9"]
EACH_STEP = ["--server-snapshot", "0"]

# As in test_elastic.py; each round has two pushes, one for each bucket.
MOMENTS = {
    "in the first round": "1:before:push:1:kill",
    "in the forward pass": "1:before:train_step:3:kill",
    "between two pushes": "1:after:push:5:kill",
    "between push and value": "1:after:push:6:kill",
    "with values that it has not recognised": "1:before:complete:4:kill",
    "after a round": "1:after:complete:3:kill",
    "in a barrier": "2:before:barrier:2:kill",
    "as the leader in mid-step": "0:after:push:5:kill",
    "as the leader in the middle of the checkpoint": "0:before:put:2:kill",
    "two, one after the other": "1:after:push:5:kill,0:before:push:9:kill",
    "two at once": "1:after:push:5:kill,2:before:push:5:kill",
}
IN_TEST = ("between two pushes",)


@thorough
def test_without_a_fault_it_is_bit_for_bit_the_plain_job(jobs):
    plain = jobs.start("", *PREFIX, *ON_SERVERS, elastic=None, workers=2)
    plain.succeed()
    elastic = jobs.start("", *PREFIX, *ON_SERVERS, workers=2)
    elastic.succeed()
    assert len(digests(plain, [0, 1]) | digests(elastic, [0, 1])) == 1


@pytest.mark.parametrize("faults", cases(MOMENTS, IN_TEST))
def test_a_worker_is_lost(jobs, faults):
    jobs.survives(faults, *ON_SERVERS, workers=3 + ("," in faults))


@thorough
@pytest.mark.parametrize("options", [["--gc-type", "int8"], ["--optimizer", "adam"]], ids=" ".join)
def test_a_worker_is_lost_with(jobs, options):
    jobs.survives(MOMENTS["between two pushes"], *ON_SERVERS[:2], *options, workers=3)


def lost_steps(job):
    """What its workers say of the optimizer's state."""
    return set(re.findall(r"the optimizer's state of .*\) is (.*)", job.outputs()))


@pytest.mark.parametrize("moment", ["1:before:evaluate:1", pytest.param("0:before:write:1", marks=thorough)])
def test_a_server_is_lost_whose_state_was_copied_after_each_step(jobs, moment):
    """Nothing is lost then, with momentum."""
    job = jobs.survives(f"{moment}:server/1", *ON_SERVERS, *EACH_STEP, lost=set(), servers_lost=(1,), workers=3)
    assert not lost_steps(job)


def goes_on(jobs, faults, *options, lost=(), servers_lost=(), servers_come=(), **more):
    """The job, whose weights no replay has."""
    env = {"DMLTRAIN_RESTART_SERVERS": str(len(servers_come))}
    job = jobs.start(faults, *PREFIX, *AUDIT, *ON_SERVERS, *options, env=env, **more)
    ended = replace_servers(job, servers_come)
    codes = job.wait()
    dead = {*(f"worker-{member}" for member in lost), *(f"server-{number}" for number in servers_lost), *ended}
    assert codes == {name: KILLED if name in dead else 0 for name in codes}, job.outputs()
    each_sample_once(job)
    assert len(digests(job, set(ranks(job)).difference(lost))) == 1, job.outputs()
    return job


IN_A_ROUND = {
    "after a push": "2:after:push:5:server/1",
    "before all know that the step is made": "1:before:complete:5:server/1",
    "with a worker": "2:after:push:5:server/1,1:before:push:7:kill",
}


@thorough
@pytest.mark.parametrize("faults", IN_A_ROUND.values(), ids=IN_A_ROUND)
def test_a_server_is_lost_in_a_round(jobs, faults):
    goes_on(jobs, faults, *EACH_STEP, lost=[1] if "kill" in faults else [], servers_lost=[1], workers=3)


@thorough
def test_what_came_after_the_last_copy_is_lost_and_the_log_says_so(jobs):
    """The first copy is made after the first step, the next one is not due."""
    job = goes_on(jobs, "1:before:evaluate:1:server/1", "--server-snapshot", "1000", servers_lost=[1], workers=3)
    assert lost_steps(job) == {"8 steps older than the weights: it is a lost server's last snapshot"}


@thorough
def test_the_last_server_is_replaced(jobs):
    job = goes_on(jobs, "1:before:evaluate:1:server/0", *EACH_STEP, servers_come=[0], workers=2, servers=1)
    assert not lost_steps(job)


@thorough
def test_a_replacement_of_a_server_gets_the_state_from_the_others(jobs):
    goes_on(jobs, "1:before:evaluate:1:server/1", *EACH_STEP, servers_come=[1], workers=2)


@thorough
def test_a_worker_that_joins_gets_weights_and_trains_on(jobs):
    faults = "1:after:push:5:kill,0:before:train_step:6:until/after/invite/1"
    job = jobs.start(faults, *PREFIX, *AUDIT, *ON_SERVERS, workers=3, env={"DMLTRAIN_MAX_WORKERS": "4"})
    come(job, 3)
    assert job.wait() == {name: KILLED if name == "worker-1" else 0 for name in job.processes}, job.outputs()
    each_sample_once(job)
    assert read(job.folder / "audit/views.json").views[-1].members == (0, 2, 3)
    assert len(digests(job, [0, 2, 3])) == 1, job.outputs()
