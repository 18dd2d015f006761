"""The kvstore of elastic jobs of real processes changes, also while members are lost; and scripts whose only weight
counts steps. Losses in jobs where each worker makes steps of its own: test_elastic_faults.py."""

import pytest

from dmltrain.audit import lines
from dmltrain.audit.views_file import read
from tests.elastic_job import ALL_COME, KILLED, Row, ask, ends, make_forker, make_jobs, shown  # noqa: F401

thorough = pytest.mark.thorough
JOINS = "0:before:train_step:6:until/after/invite/1"  # the leader goes on when it has heard of a newcomer, or a change
THERE_AND_BACK = {  # the kvstore at the start -> who makes steps then, options, and two others, as views have them
    "dist_sync": ("on servers", "--lr 0.02", ("dist_ssp", 4.0), ("dist_sync", 0.0)),
    "dist_ssp": ("dist_ssp", "--staleness 3", ("dist_sync", 0.0), ("dist_ssp", 3.0)),
    "dist_async": ("dist_async", "", ("dist_sync", 0.0), ("dist_async", 0.0)),
}


def asked(kvstore, staleness=0.0):
    """The number of steps that may be between two workers is not said where it is none."""
    return f"{kvstore} {staleness or -1.0}"


@pytest.mark.parametrize(
    "start", [pytest.param(each, marks=[thorough] * (each != "dist_sync")) for each in THERE_AND_BACK]
)
def test_the_kvstore_changes_between_steps_of_all_workers_and_steps_of_one(jobs, start):
    steps, options, there, back = THERE_AND_BACK[start]
    first = (start, 3.0 * (start == "dist_ssp"))
    expected = [(*first, False), (*first, True), (*there, False), (*there, True), (*back, False)]
    jobs.run(
        Row(
            f"{JOINS},0:before:train_step:12:until/after/invite/2",
            steps,
            options=f"{options} --num-epochs 3",
            asks=(asked(*there), asked(back[0])),
            replayed=False,
            says=("scheduler-0: change 1 from view 3 on", "scheduler-0: change 2 from view 5 on"),
            views={"kvstore staleness drains": expected},
        )
    )


@pytest.mark.parametrize("start", [pytest.param("dist_sync", marks=thorough), "dist_ssp"])
def test_in_a_script_each_step_counts_once_whoever_makes_it(jobs, start):
    """Also after a change a step of all workers has their mean gradient, and one of a worker its own."""
    _, _, there, back = THERE_AND_BACK[start]
    env = {"WAITS": "", "DMLTRAIN_AUDIT": "audit"}
    job = jobs.start(start, "6", program="constant_gradient.py", workers=3, env=env, asks=True)
    job.wait_for_line("worker-0", "View 1")
    for number, epoch, view, kvstore in ((1, 1, 3, asked(*there)), (2, 4, 5, back[0])):
        ask(job, number, *kvstore.split())
        job.wait_for_line("scheduler-0", f"change {number} is asked for")
        (job.folder / f"go-{epoch}").touch()
        job.wait_for_line("scheduler-0", f"change {number} from view {view} on")
    ends(job)
    each_step_once(job, range(3))


def each_step_once(job, left):
    """The weights of those who are left say that they have all steps of all workers."""
    alone = {view.number for view in read(job.folder / "audit/views.json").views if view.kvstore != "dist_sync"}
    made = {
        (line.op, line.members if line.view in alone else ())
        for rank in range(3)
        for line in lines.commits(job.folder / "audit", rank)
    }
    assert {f"The weight says {len(made)} steps"} == {
        line for rank in left for line in job.output(f"worker-{rank}").splitlines() if line.startswith("The weight")
    }


@pytest.mark.parametrize("late", ["1 synchronize", pytest.param("0 save", marks=thorough)])
def test_others_are_in_the_next_epoch_when_a_worker_is_lost(jobs, late):
    """This one, who takes weights or saves, is late, and goes on with the samples that the others have not used."""
    env = {"DMLTRAIN_AUDIT": "audit"}
    job = jobs.start("dist_async", "3", *late.split(), program="constant_gradient.py", workers=3, env=env)
    ends(job, worker_2=KILLED)
    each_step_once(job, range(2))


# The second view drains, and the third has the other kvstore, if nobody is lost before. In a round or after own steps
# the loss may come first. -> the fault, and the kvstore at the start with which CI has it
IN_A_CHANGE = {
    "a worker while others complete their step": ("1:after:announce:2:kill", "dist_sync"),
    "the leader while others complete their step": ("0:after:announce:2:kill", ""),
    "a server while workers complete their step": ("1:after:announce:2:server/1", ""),
    "the scheduler while workers complete their step": ("1:after:announce:2:scheduler", "dist_ssp"),
    "a worker when the kvstore changes": ("1:after:announce:3:kill", ""),
    "the leader when the kvstore changes": ("0:after:announce:3:kill", "dist_ssp"),
    "a server when the kvstore changes": ("1:after:announce:3:server/1", "dist_ssp"),
    "the scheduler when the kvstore changes": ("1:after:announce:3:scheduler", ""),
    "a worker when all have made their round": ("1:before:complete:6:kill", "dist_sync"),
    "a worker when all have made their own steps": ("1:after:barrier:4:kill", "dist_ssp"),
    "nobody, but one leaves": ("1:after:announce:2:leave", "dist_sync"),
}


@pytest.mark.parametrize(
    ("fault", "start"),
    [
        pytest.param(fault, start, marks=thorough if start == in_ci else pytest.mark.exhaustive)
        for fault, (_, in_ci) in IN_A_CHANGE.items()
        for start in ("dist_sync", "dist_ssp")
    ],
)
def test_in_a_change_of_the_kvstore_is_lost(jobs, start, fault):
    """The change begins again, unless the scheduler is lost that was asked for it."""
    steps, options, there, _ = THERE_AND_BACK[start]
    row = Row(
        f"{JOINS},{IN_A_CHANGE[fault][0]}",
        steps,
        options=f"{options} --num-epochs 4",
        asks=(asked(*there),),
        servers_come=(1,) if "server/1" in IN_A_CHANGE[fault][0] else (),
        replayed=False,
    )
    views = read(jobs.run(row).folder / "audit/views.json").views
    assert any(view.drains for view in views) and not views[-1].drains
    assert views[1].drains or "announce" not in IN_A_CHANGE[fault][0], "that is the view which they are told of"
    if fault != "the scheduler while workers complete their step":
        assert (views[-1].kvstore, views[-1].staleness) == there


NOW = r"kv_store=dist_async \(before: kv_store=dist_ssp staleness=0\)"
CHANGES = {
    "the state of the only server is lost if it is lost before a copy is made": Row(
        f"{JOINS},1:after:announce:3:server/0",
        "on servers",
        options="--server-snapshot 1000",
        servers=1,
        servers_come=(0,),
        asks=("dist_async",),
        replayed=False,
        says=("any: the optimizer's state of .* is lost with their server, and begins anew",),
        silent=("older than the weights",),
    ),
    # A replacement of a server, and a newcomer, go on with what the kvstore is now.
    "the kvstore changes with a view": Row(
        f"{JOINS},1:after:push:11:server/1 once 0/after/invite/1,1:after:push:15:kill,"
        f"0:before:train_step:14:go on {ALL_COME}",
        "dist_ssp",
        options="--staleness 0 --num-epochs 8",
        servers_come=(1,),
        come=(3,),
        come_after="worker-0: View 1",
        asks=("dist_async",),
        says=("scheduler-0: change 1 from view 2 on: kv_store=dist_async", *(f"worker-{n}: {NOW}" for n in range(4))),
    ),
    "dist_sync with the optimizer on the workers stays": Row(
        JOINS,
        workers=2,
        come=(2,),
        come_after="scheduler-0: change 1 is refused: the workers run the optimizer",
        asks=("dist_async",),
    ),
}


@thorough
@pytest.mark.parametrize("name", CHANGES)
def test_changes(jobs, name):
    job = jobs.run(CHANGES[name])
    if name == "the kvstore changes with a view":
        first, *others = shown(job, "kvstore staleness")
        assert first == ("dist_ssp", 0.0) and {*others} == {("dist_async", 0.0)}
