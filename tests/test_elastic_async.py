"""Elastic jobs with dist_async and dist_ssp, where each worker makes steps of its own, which lose members at exact
moments."""

import json
import re
import shutil

import pytest

from dmltrain.audit import lines
from dmltrain.audit.views_file import read
from tests.elastic.test_suspects import ended as blamed
from tests.elastic_job import (  # noqa: F401
    AUDIT,
    KILLED,
    PREFIX,
    come,
    digests,
    each_sample_once,
    make_forker,
    make_jobs,
    put,
    ranks,
    replace_schedulers,
    replace_servers,
)
from tests.test_departures import WAIT
from tests.test_departures import ended as stopped
from tests.test_elastic import cases, refused

thorough = pytest.mark.thorough
ASYNC = ["--kv-store", "dist_async"]
STRICT = ["--kv-store", "dist_ssp", "--staleness", "0"]
LOOSE = ["--kv-store", "dist_ssp", "--staleness", "2"]
MOMENTUM = ["--mom", "0.9", "--lr", "0.02"]
JOINS = "0:before:train_step:6:until/after/invite/1"  # the leader goes on when it has heard of a newcomer, or a change

# As in test_elastic.py; each step has two pushes, one for each bucket.
MOMENTS = {
    "in the first step": "1:before:push:1:kill",
    "in the forward pass": "1:before:train_step:3:kill",
    "between two pushes": "1:after:push:5:kill",
    "between push and value": "1:after:push:6:kill",
    "in a barrier": "2:before:barrier:2:kill",
    "when all its samples are used": "1:before:op:1:kill",
    "as the leader in mid-step": "0:after:push:5:kill",
    "as the leader in the middle of the checkpoint": "0:before:put:2:kill",
    "two, one after the other": "1:after:push:5:kill,0:before:push:9:kill",
    "two at once": "1:after:push:5:kill,2:before:push:5:kill",
    "one in the view without the other": "1:after:push:5:kill,2:before:exchange:1:kill",
    "one when all have told what they hold": "1:after:push:5:kill,2:before:settle:1:kill",
}
IN_TEST = ("between two pushes",)
WITH_ASYNC = ("between two pushes", "as the leader in mid-step", "one when all have told what they hold")


def goes_on(jobs, faults, *options, lost=(), servers_lost=(), servers_come=(), schedulers=0, leaves=(), **more):
    """The job: each sample of each epoch was used once, and all that are left have the same weights."""
    env = {"DMLTRAIN_RESTART_SERVERS": str(len(servers_come))}
    env |= {"DMLTRAIN_SCHEDULER_FILE": "scheduler.json"} if schedulers else {}
    job = jobs.start(faults, *PREFIX, *AUDIT, *MOMENTUM, *options, env=env, **more)
    ended = [*replace_servers(job, servers_come), *replace_schedulers(job, schedulers)]
    check(job, lost, [*ended, *(f"server-{number}" for number in servers_lost)], leaves)
    return job


def check(job, lost, ended=(), leaves=()):
    codes = job.wait()
    dead = {f"worker-{member}" for member in lost} | {*ended}
    assert codes == {name: KILLED if name in dead else 0 for name in codes}, job.outputs()
    each_sample_once(job)
    left = set(ranks(job)) - set(lost) - set(leaves)
    assert len(digests(job, left)) == 1, job.outputs()
    assert "Train-accuracy" in job.outputs()


@thorough
@pytest.mark.parametrize("kind", [ASYNC, STRICT, LOOSE], ids=" ".join)
def test_without_a_fault(jobs, kind):
    goes_on(jobs, "", *kind, workers=3)


@pytest.mark.parametrize("faults", cases(MOMENTS, IN_TEST))
def test_a_worker_is_lost(jobs, faults):
    loses_a_worker(jobs, STRICT, faults)


@pytest.mark.parametrize(
    "moment", [pytest.param(each, marks=thorough if each in WITH_ASYNC else pytest.mark.exhaustive) for each in MOMENTS]
)
def test_a_worker_of_dist_async_is_lost(jobs, moment):
    loses_a_worker(jobs, ASYNC, MOMENTS[moment])


def loses_a_worker(jobs, kind, faults):
    goes_on(jobs, faults, *kind, lost={int(each[0]) for each in faults.split(",")}, workers=3 + ("," in faults))


@thorough
@pytest.mark.parametrize("options", ["--gc-type int8", "--gc-type 2bit", "--optimizer adam"])
def test_a_worker_is_lost_with(jobs, options):
    goes_on(jobs, MOMENTS["between two pushes"], *LOOSE, *options.split(), lost=[1], workers=3)


SERVERS = {
    "after a push": "2:after:push:5:server/1",
    "before a push": "1:before:push:5:server/1",
    "in validation": "1:before:evaluate:1:server/1",
    "with a worker": "2:after:push:5:server/1,1:before:push:7:kill",
    "when all have told what they hold": "1:after:push:5:kill,0:before:settle:1:server/1",
}


@thorough
@pytest.mark.parametrize("faults", SERVERS.values(), ids=SERVERS)
@pytest.mark.parametrize("kind", [ASYNC, STRICT], ids=" ".join)
def test_a_server_is_lost(jobs, kind, faults):
    goes_on(jobs, faults, *kind, lost=[1] if "kill" in faults else [], servers_lost=[1], workers=3)


def lost_steps(job):
    """What its workers say of the optimizer's state."""
    return re.findall(r"the optimizer's state of .*\) is (.*)", job.outputs())


@thorough
def test_what_came_after_the_last_copy_is_lost_and_the_log_says_so(jobs):
    """The first copy is made after the first step, the next one is not due."""
    faults = "1:before:evaluate:1:server/1"
    job = goes_on(jobs, faults, *STRICT, "--server-snapshot", "1000", servers_lost=[1], workers=3)
    assert all("older than the weights" in text for text in lost_steps(job)) and lost_steps(job)


@thorough
@pytest.mark.parametrize("number, servers", [(0, 1), (1, 2)], ids=["the last one", "one of two"])
@pytest.mark.parametrize("moment", ["1:before:evaluate:1", "1:after:push:7"])
def test_a_server_is_replaced(jobs, moment, number, servers):
    faults = f"{moment}:server/{number}"
    goes_on(jobs, faults, *LOOSE, "--server-snapshot", "0", servers_come=[number], workers=2, servers=servers)


@thorough
@pytest.mark.parametrize("kind", [ASYNC, STRICT], ids=" ".join)
def test_a_worker_joins_and_trains_on(jobs, kind):
    faults = f"1:after:push:5:kill,{JOINS}"
    options = [*PREFIX, *AUDIT, *MOMENTUM, *kind]
    job = jobs.start(faults, *options, workers=3, env={"DMLTRAIN_MAX_WORKERS": "4"})
    come(job, 3)
    check(job, [1])
    assert read(job.folder / "audit/views.json").views[-1].members == (0, 2, 3)
    assert (job.folder / "audit/commits-3.jsonl").read_text()


@thorough
def test_another_worker_is_lost_before_a_newcomer_has_made_a_step(jobs):
    """The newcomer has the others' state, and takes part in the next deal."""
    options = [*PREFIX, *AUDIT, *MOMENTUM, *ASYNC]
    job = jobs.start(f"2:after:settle:1:kill,{JOINS}", *options, workers=3, env={"DMLTRAIN_MAX_WORKERS": "4"})
    come(job, 3)
    check(job, [2])
    assert read(job.folder / "audit/views.json").views[-1].members == (0, 1, 3)


def ask(job, number, kv_store, staleness=-1.0):
    """As `dmltrain job set` does."""
    change = {"number": number, "kv_store": kv_store, "staleness": staleness, "by": "me"}
    put(job.folder / "change", json.dumps(change))


SYNC = ["--kv-store", "dist_sync", "--update-on-kvstore", "1"]
THERE_AND_BACK = {  # the kvstore at the start -> two others, as the user asks for them and as views have them
    "dist_sync": (SYNC, ("dist_ssp", 4.0), ("dist_sync", 0.0)),
    "dist_ssp": (STRICT, ("dist_sync", 0.0), ("dist_ssp", 3.0)),
    "dist_async": (ASYNC, ("dist_sync", 0.0), ("dist_async", 0.0)),
}


@pytest.mark.parametrize(
    "start", [pytest.param(each, marks=[thorough] * (each != "dist_sync")) for each in THERE_AND_BACK]
)
def test_the_kvstore_changes_between_steps_of_all_workers_and_steps_of_one(jobs, start):
    options, there, back = THERE_AND_BACK[start]
    env = {"DMLTRAIN_CHANGE_FILE": "change"}
    job = jobs.start("", *PREFIX, *AUDIT, *MOMENTUM, *options, "--num-epochs", "3", workers=3, env=env)
    job.wait_for_line("worker-0", "View 1")
    ask(job, 1, there[0], there[1] or -1.0)
    job.wait_for_line("scheduler-0", "change 1 from view 3 on")
    ask(job, 2, back[0])
    job.wait_for_line("scheduler-0", "change 2 from view 5 on")
    check(job, [])
    views = read(job.folder / "audit/views.json").views
    assert [(each.kvstore, each.staleness, each.drains) for each in views] == [
        (start, 0.0, False),
        (start, 0.0, True),
        (*there, False),
        (*there, True),
        (*back, False),
    ]


@pytest.mark.parametrize("start", [pytest.param("dist_sync", marks=thorough), "dist_ssp"])
def test_in_a_script_each_step_counts_once_whoever_makes_it(jobs, start):
    """Also after a change a step of all workers has their mean gradient, and one of a worker its own."""
    _, there, back = THERE_AND_BACK[start]
    env = {"DMLTRAIN_CHANGE_FILE": "change", "DMLTRAIN_AUDIT": "audit"}
    job = jobs.start(start, "6", program="constant_gradient.py", workers=3, env=env)
    job.wait_for_line("worker-0", "View 1")
    ask(job, 1, there[0], there[1] or -1.0)
    job.wait_for_line("scheduler-0", "change 1 from view 3 on")
    ask(job, 2, back[0])
    job.wait_for_line("scheduler-0", "change 2 from view 5 on")
    job.succeed()
    each_sample_once(job)
    each_step_once(job, range(3))


def each_step_once(job, left):
    """The weights of those who are left say that they have all steps of all workers."""
    alone = {each.number for each in read(job.folder / "audit/views.json").views if each.kvstore != "dist_sync"}
    made = {
        (line.op, line.members if line.view in alone else ())
        for rank in range(3)
        for line in lines.commits(job.folder / "audit", rank)
    }
    assert {f"The weight says {len(made)} steps"} == {
        each for rank in left for each in job.output(f"worker-{rank}").splitlines() if each.startswith("The weight")
    }


LATE = {
    "another takes weights": ["1", "synchronize"],
    "the leader takes weights": ["0", "synchronize"],
    "the leader saves": ["0", "save"],
}


@pytest.mark.parametrize("late", cases(LATE, ["another takes weights"]))
def test_others_are_in_the_next_epoch_when_a_worker_is_lost(jobs, late):
    """One is late, and goes on with the samples that the others have not used."""
    env = {"DMLTRAIN_AUDIT": "audit"}
    job = jobs.start("dist_async", "3", *late, program="constant_gradient.py", workers=3, env=env)
    codes = job.wait()
    assert codes == {name: KILLED if name == "worker-2" else 0 for name in codes}, job.outputs()
    each_sample_once(job)
    each_step_once(job, range(2))


# The second view drains, and the third has the other kvstore, if nobody is lost before.
IN_A_CHANGE = {
    "a worker while others complete their step": "1:after:announce:2:kill",
    "the leader while others complete their step": "0:after:announce:2:kill",
    "a worker when the kvstore changes": "1:after:announce:3:kill",
    "the leader when the kvstore changes": "0:after:announce:3:kill",
    "a server while workers complete their step": "1:after:announce:2:server/1",
    "a server when the kvstore changes": "1:after:announce:3:server/1",
    "the scheduler while workers complete their step": "1:after:announce:2:scheduler",
    "the scheduler when the kvstore changes": "1:after:announce:3:scheduler",
    "a worker when all have made their round": "1:before:complete:6:kill",
    "a worker when all have made their own steps": "1:after:barrier:4:kill",
    "nobody, but one leaves": "1:after:announce:2:leave",
}


@thorough
@pytest.mark.parametrize("start", ["dist_sync", "dist_ssp"])
@pytest.mark.parametrize("fault", IN_A_CHANGE.values(), ids=IN_A_CHANGE)
def test_in_a_change_of_the_kvstore_is_lost(jobs, start, fault):
    """The change begins again, unless the scheduler is lost that was asked for it."""
    options, there, _ = THERE_AND_BACK[start]
    words = [*PREFIX, *AUDIT, *MOMENTUM, *options, "--num-epochs", "4"]
    env = {"DMLTRAIN_CHANGE_FILE": "change", "DMLTRAIN_RESTART_SERVERS": "1"}
    env |= {"DMLTRAIN_SCHEDULER_FILE": "scheduler.json"} if "scheduler" in fault else {}
    job = jobs.start(f"{JOINS},{fault}", *words, workers=3, env=env)
    job.wait_for_line("worker-0", "View 1")
    ask(job, 1, there[0], there[1] or -1.0)
    ended = replace_servers(job, [1]) if "server" in fault else []
    ended += replace_schedulers(job, 1) if "scheduler" in fault else []
    lost = [int(fault[0])] if fault.endswith("kill") else []
    check(job, lost, ended, leaves=[1] if "leave" in fault else [])
    views = read(job.folder / "audit/views.json").views
    assert views[1].drains and not views[-1].drains
    if fault != IN_A_CHANGE["the scheduler while workers complete their step"]:
        assert (views[-1].kvstore, views[-1].staleness) == there


@thorough
def test_the_state_of_the_only_server_is_lost_if_it_is_lost_before_a_copy_is_made(jobs):
    words = [*PREFIX, *AUDIT, *MOMENTUM, *SYNC, "--server-snapshot", "1000"]
    env = {"DMLTRAIN_CHANGE_FILE": "change", "DMLTRAIN_RESTART_SERVERS": "1"}
    job = jobs.start(f"{JOINS},1:after:announce:3:server/0", *words, workers=3, servers=1, env=env)
    job.wait_for_line("worker-0", "View 1")
    ask(job, 1, "dist_async")
    check(job, [], replace_servers(job, [0]))
    assert lost_steps(job) == ["lost with their server, and begins anew"]


@thorough
@pytest.mark.parametrize("lost", [[], [1]], ids=["", "and a worker is lost"])
def test_the_kvstore_changes_with_a_view(jobs, lost):
    """A replacement of a server, and a newcomer, go on with what it is now."""
    faults = f"{JOINS},1:after:push:11:server/1" + ",1:after:push:15:kill" * len(lost)
    env = {"DMLTRAIN_MAX_WORKERS": "4", "DMLTRAIN_RESTART_SERVERS": "1", "DMLTRAIN_CHANGE_FILE": "change"}
    job = jobs.start(faults, *PREFIX, *AUDIT, *MOMENTUM, *STRICT, "--num-epochs", "3", workers=3, env=env)
    job.wait_for_line("worker-0", "View 1")
    ask(job, 1, "dist_async")
    ended = replace_servers(job, [1])
    come(job, 3)
    check(job, lost, ended)
    assert "change 1 from view 2 on: kv_store=dist_async" in job.output("scheduler-0")
    now = "kv_store=dist_async (before: kv_store=dist_ssp staleness=0)"
    assert all(now in job.output(f"worker-{rank}") for rank in range(4))
    views = read(job.folder / "audit/views.json").views
    assert [(each.kvstore, each.staleness) for each in views] == [
        ("dist_ssp", 0.0),
        *[("dist_async", 0.0)] * (len(views) - 1),
    ]


@thorough
def test_dist_sync_with_the_optimizer_on_the_workers_stays(jobs):
    env = {"DMLTRAIN_CHANGE_FILE": "change"}
    job = jobs.start(JOINS, *PREFIX, *AUDIT, workers=2, env={**env, "DMLTRAIN_MAX_WORKERS": "3"})
    job.wait_for_line("worker-0", "View 1")
    ask(job, 1, "dist_async")
    job.wait_for_line("scheduler-0", "change 1 is refused: the workers run the optimizer")
    come(job, 2)
    check(job, [])


@thorough
@pytest.mark.parametrize("faults", ["1:after:push:5:leave", "0:after:push:8:leave"], ids=["another", "the leader"])
@pytest.mark.parametrize("options", [[*ASYNC], [*STRICT, "--gc-type", "int8"]], ids=" ".join)
def test_sigterm_is_a_notice_to_leave(jobs, options, faults):
    heard = "0:before:train_step:12:until/after/invite/1"
    job = goes_on(jobs, f"{faults},{heard}", *options, workers=3, leaves=[int(faults[0])])
    views = read(job.folder / "audit/views.json").views
    assert {each.member for view in views for each in view.left} == {int(faults[0])}
    assert not any(view.lost for view in views)


@thorough
def test_the_scheduler_is_lost(jobs):
    goes_on(jobs, "1:after:push:7:scheduler", *STRICT, schedulers=1, workers=3)


@thorough
def test_the_scheduler_is_lost_with_a_worker(jobs):
    goes_on(jobs, "1:after:push:7:scheduler,2:after:push:9:kill", *ASYNC, schedulers=1, lost=[2], workers=3)


@thorough
@pytest.mark.parametrize("kind", [ASYNC, STRICT], ids=" ".join)
def test_a_sample_at_which_everybody_fails_ends_the_job(jobs, kind):
    job = jobs.start("any:sample:17", *kind, workers=3, servers=1)
    assert 17 in blamed(job, "RuntimeError: a bad sample")


@thorough
def test_a_notice_below_the_minimum_ends_the_job_with_a_checkpoint(jobs):
    """Worker 1 is in the middle of a step then, which it makes no more: nobody may wait for it."""
    heard = "0:before:train_step:3:until/after/invite/1"
    faults = f"1:after:push:6:leave,1:before:push:7:until/after/announce/2,{heard}"
    job = jobs.start(faults, *PREFIX, *AUDIT, *STRICT, workers=2, servers=1, elastic=2)
    (saved,) = stopped(job, r"the job ends: worker 1 leaves on purpose: SIGTERM; 1 worker is left")
    for elastic in (None, 1):
        folder = job.folder / f"elastic {elastic}"
        folder.mkdir()
        shutil.copy(saved, folder)
        words = ["--model-prefix", folder / "m", "--load-epoch", "last", *STRICT]
        other = jobs.start("", *words, workers=2, servers=1, elastic=elastic)
        other.succeed()
        assert re.search(r"Loaded checkpoint of epoch 0 and \d+ steps of the next", other.output("worker-0"))


@thorough
@pytest.mark.parametrize("how", ["kill", "leave"])
def test_a_job_with_too_few_waits_for_more(jobs, how):
    options = [*PREFIX, *AUDIT, *MOMENTUM, *STRICT]
    job = jobs.start(f"1:after:push:7:{how}", *options, workers=2, servers=1, elastic=2, env=WAIT)
    job.wait_for_line("scheduler-0", "1 worker is left, and --min-workers is 2: the job waits up to 60 s for more")
    come(job, 2)
    check(job, [1] if how == "kill" else [], leaves=[1])
    assert read(job.folder / "audit/views.json").views[-1].members == (0, 2)


REFUSED = {
    "--replay there": "--replay needs --kv-store dist_sync: with dist_ssp each worker makes steps of its own",
    "--balance": "--balance needs --kv-store dist_sync",
    "--batch per-worker": "--batch per-worker needs --kv-store dist_sync",
}


@pytest.mark.parametrize(
    "elastic, words, said",
    [
        (1, [], "--rule needs the optimizer on the servers: dist_async, dist_ssp, or"),
        (None, [], "--rule needs the optimizer on the servers: dist_async, dist_ssp, or"),
        (None, ["--backend", "mxnet"], "--rule: ps-lite, of --backend mxnet, cannot change its kvstore; use --backend"),
    ],
)
def test_rules_that_could_never_change_the_kvstore_are_refused(jobs, elastic, words, said):
    job = jobs.start("", *words, workers=1, servers=1, elastic=elastic, env={"DMLTRAIN_STRAGGLERS": "1"})
    refused(job, f"error: {said}")


@pytest.mark.parametrize("words", REFUSED)
def test_what_needs_steps_of_all_workers_is_refused(jobs, words):
    refused(jobs.start("", *LOOSE, *words.split(), workers=1, servers=1), f"error: {REFUSED[words]}")
