"""Workers of real elastic jobs leave on purpose, and jobs that have too few of them."""

import re
import shutil
import signal

import pytest

from dmltrain.audit.count import count
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
    same,
)

thorough = pytest.mark.thorough
MOMENTS = {  # of the first epoch
    "between two pushes": "1:after:pushpull:7:leave",
    "with values that it has not recognised": "1:before:complete:4:leave",
    "in the first round": "1:before:pushpull:1:leave",
    "in validation": "1:before:evaluate:5:leave",
    "as the leader in mid-step": "0:after:pushpull:8:leave",
    "as the leader in validation": "0:before:evaluate:5:leave",
    "as the leader in a checkpoint": "0:before:write:1:leave",
}
IN_TEST = "between two pushes"
REASON = "SIGTERM"
HEARD = "0:before:train_step:12:until/after/invite/1"  # the leader goes on when it has heard of the notice


def cases(found):
    return [pytest.param(each, id=name, marks=[] if name == IN_TEST else thorough) for name, each in found.items()]


def leaves(jobs, faults, who, *options, workers=3):
    """Run a job whose members `who` leave, and the replay of it. Returns the job."""
    job = jobs.start(f"{faults},{HEARD}", *PREFIX, *AUDIT, *options, workers=workers)
    job.succeed()
    each_sample_once(job)
    views = read(job.folder / "audit/views.json").views
    left = [each for view in views for each in view.left]
    assert {each.member for each in left} == who and {each.reason for each in left} == {REASON}, job.outputs()
    assert not any(view.lost for view in views) and set(views[-1].members) == set(range(workers)) - who
    for member in who:
        line = rf"worker {member} on \S+ leaves on purpose: {REASON}\n"
        assert re.search(rf"\d{{4}}-\d\d-\d\d \S+ {line}", job.output("scheduler-0")), job.outputs()
        said = job.output(f"worker-{member}")
        assert f"This worker's part has ended: it leaves the job on purpose ({REASON})" in said
        for other in set(range(workers)) - who:
            assert f"Left the job on purpose: worker {member}: {REASON}" in job.output(f"worker-{other}")
    replay = jobs.start("", *PREFIX, "--replay", job.folder / "audit/views.json", *options, workers=workers)
    replay.succeed()
    same(job, replay, sorted(set(ranks(job)) - who))
    return job


@pytest.mark.parametrize("fault", cases(MOMENTS))
def test_sigterm_is_a_notice_to_leave(jobs, fault):
    leaves(jobs, fault, {int(fault[0])})


@thorough
def test_who_leaves_does_not_wait_for_a_server_that_is_lost_meanwhile(jobs):
    """No later view tells it of the loss."""
    faults = f"1:after:pushpull:7:leave,1:before:close:1:server/1,{HEARD}"
    job = jobs.start(faults, *PREFIX, *AUDIT, workers=3, env={"DMLTRAIN_LEAVE_SECONDS": "60"})
    codes = job.wait(40.0)
    assert codes == {name: KILLED if name == "server-1" else 0 for name in codes}, job.outputs()
    each_sample_once(job)


TOGETHER = {
    "two": "1:after:pushpull:7:leave,2:before:complete:4:leave",
    "the leader and another": "0:after:pushpull:7:leave,2:before:complete:4:leave",
    "all but the last": "0:after:pushpull:7:leave,1:before:complete:4:leave,2:after:pushpull:2:leave",
}


@thorough
@pytest.mark.parametrize("faults", TOGETHER.values(), ids=TOGETHER)
def test_several_leave(jobs, faults):
    who = {int(each[0]) for each in faults.split(",")}
    leaves(jobs, f"{faults},3:before:train_step:14:until/after/announce/2", who, workers=4)


@thorough
@pytest.mark.parametrize("moment", ["before:complete:5", "after:announce:2", "after:freeze:1"])
def test_one_leaves_and_another_is_lost(jobs, moment):
    job = jobs.start(f"1:before:complete:4:leave,2:{moment}:kill,{HEARD}", *PREFIX, *AUDIT)
    codes = job.wait()
    assert codes == {name: KILLED if name == "worker-2" else 0 for name in codes}, job.outputs()
    each_sample_once(job)
    views = read(job.folder / "audit/views.json").views
    assert views[-1].members == (0, 3)
    assert [[each.member for view in views for each in group(view)] for group in (lost, left)] == [[2], [1]]
    replay = jobs.start("", *PREFIX, "--replay", job.folder / "audit/views.json")
    replay.succeed()
    same(job, replay, (0, 3))


def lost(view):
    return view.lost


def left(view):
    return view.left


@thorough
def test_one_leaves_and_another_comes(jobs):
    """The newcomer joins before the other leaves, after that, or in the same view. In the last case the leader is
    invited once, and hears of the newcomer a second time with the view."""
    faults = "1:before:complete:2:leave,0:before:train_step:12:until/after/newcomer/2"
    job = jobs.start(faults, *PREFIX, *AUDIT, workers=2, env={"DMLTRAIN_MAX_WORKERS": "3"})
    come(job, 2)
    job.succeed()
    each_sample_once(job)
    assert read(job.folder / "audit/views.json").views[-1].members == (0, 2)


@thorough
@pytest.mark.parametrize("moment", ["1:before:complete:3:leave,1:after:complete:3:leave", "1:before:complete:3:leave"])
def test_one_that_does_not_leave_ends_as_lost(jobs, moment):
    """With a second SIGTERM, or after DMLTRAIN_LEAVE_SECONDS: the leader begins no round before that."""
    env = {"DMLTRAIN_LEAVE_SECONDS": "1"} if moment.count("leave") == 1 else {}
    job = jobs.start(f"{moment},0:after:complete:3:until/after/announce/2", *AUDIT, workers=3, env=env)
    codes = job.wait()
    assert codes == {name: -signal.SIGTERM if name == "worker-1" else 0 for name in codes}, job.outputs()
    if env:
        assert "Not left within 1 s (DMLTRAIN_LEAVE_SECONDS)" in job.output("worker-1")
    each_sample_once(job)
    views = read(job.folder / "audit/views.json").views
    assert [[each.member for view in views for each in group(view)] for group in (lost, left)] == [[1], []]


# -- residuals of a compression ---------------------------------------------------------------------------------------


CODECS = [pytest.param(each, marks=[] if each == "int8" else thorough) for each in ("int8", "2bit", "topk", "bf16")]


@pytest.mark.parametrize("codec", CODECS)
def test_residuals_are_handed_over(jobs, codec):
    """Replay and job have the same weights, and the same residuals in their checkpoints. What is handed over arrives:
    tests/kvstore/test_handing_over.py."""
    job = leaves(jobs, MOMENTS["with values that it has not recognised"], {1}, "--gc-type", codec)
    views = read(job.folder / "audit/views.json").views
    assert [view.hands_over for view in views] == [(), ()] if codec == "bf16" else [(), (1,), ()]
    says = "Compression: worker 0 takes over the residuals of workers 1" in job.output("worker-2")
    assert says == (codec != "bf16") and "residuals of these workers are lost" not in job.outputs()


@thorough
def test_several_hand_over(jobs):
    who = {0, 2}
    faults = f"{TOGETHER['the leader and another']},3:before:train_step:14:until/after/announce/2"
    job = leaves(jobs, faults, who, "--gc-type", "int8", workers=4)
    views = read(job.folder / "audit/views.json").views
    assert {each for view in views for each in view.hands_over} == who


DEATHS = {  # while worker 1 hands over: what happens -> the lost worker, and whose residuals are
    "1:before:exchange:1:kill": (1, "1"),
    "1:before:settle:1:kill": (1, None),  # it may be recognised or not
    "1:after:settle:1:kill": (1, ""),
    "0:before:exchange:1:kill": (0, "0"),
    "0:after:settle:1:kill": (0, "0"),
    "2:after:exchange:1:kill": (2, "2"),
}


@thorough
@pytest.mark.parametrize("death", DEATHS)
def test_one_dies_while_residuals_are_handed_over(jobs, death):
    """The leader waits before the next round until the death is known, so that it is in one of the views."""
    dead, whose = DEATHS[death]
    faults = f"1:before:complete:4:leave,{HEARD},{death}"
    job = jobs.start(faults, *PREFIX, *AUDIT, "--gc-type", "int8")
    codes = job.wait()
    assert codes == {name: KILLED if name == f"worker-{dead}" else 0 for name in codes}, job.outputs()
    each_sample_once(job)
    views = read(job.folder / "audit/views.json").views
    stayed = {0, 2, 3} - {dead}
    assert set(views[-1].members) == stayed and any(view.hands_over == (1,) for view in views)
    said = re.search(r"the residuals of these workers are lost: (.*)", job.output("worker-3"))
    assert whose is None or (said[1] if said else "") == whose, job.outputs()
    replay = jobs.start("", *PREFIX, "--replay", job.folder / "audit/views.json", "--gc-type", "int8")
    replay.succeed()
    same(job, replay, sorted(stayed))


# -- jobs with too few members ----------------------------------------------------------------------------------------


def ended(job, reason):
    """The job has ended with 75 and a checkpoint, from which another goes on."""
    codes = job.wait()
    workers = [name for name in codes if name.startswith("worker") and codes[name] not in (0, KILLED)]
    others = [name for name in codes if not name.startswith("worker")]
    assert workers and {codes[name] for name in (*workers, *others)} == {75}, job.outputs()
    for name in (*workers, "scheduler-0"):
        assert re.search(reason, job.output(name)), job.outputs()
    assert "Traceback" not in job.outputs()
    return [path for path in job.folder.glob("m-*") if path.suffix != ".part"]


def test_a_notice_below_the_minimum_ends_the_job_with_a_checkpoint(jobs):
    faults = "1:after:pushpull:7:leave,0:before:train_step:6:until/after/invite/1"
    job = jobs.start(faults, *PREFIX, *AUDIT, workers=2, servers=1, elastic=2)
    said = rf"the job ends: worker 1 leaves on purpose: {REASON}; 1 worker is left, and --min-workers is 2"
    (saved,) = ended(job, said)
    assert all("never committed" in each for each in count(job.folder / "audit").problems)
    found = set()
    for elastic in (None, 1):
        folder = job.folder / f"elastic {elastic}"
        folder.mkdir()
        shutil.copy(saved, folder)
        words = ["--model-prefix", folder / "m", "--load-epoch", "last"]
        other = jobs.start("", *words, workers=2, servers=1, elastic=elastic)
        other.succeed()
        assert re.search(r"Loaded checkpoint of epoch 0 and \d+ steps of the next", other.output("worker-0"))
        found |= digests(other, (0, 1))
    assert len(found) == 1, "an elastic job goes on from it as a plain one does"


@thorough
@pytest.mark.parametrize("workers", [1, 3])
def test_all_leave(jobs, workers):
    """Nobody could go on: the job ends with a checkpoint."""
    faults = [f"{rank}:after:pushpull:7:leave" for rank in range(workers)]
    heard = f"0:before:train_step:6:until/after/invite/{workers}"
    job = jobs.start(",".join([*faults, heard]), *PREFIX, workers=workers, servers=1)
    assert ended(job, f"worker {workers - 1} leaves on purpose: {REASON}; no worker is left")


WAIT = {"DMLTRAIN_WAIT_FOR_HOSTS": "60", "DMLTRAIN_MAX_WORKERS": "4"}
TOO_FEW = {"a loss": ("kill", {1}), "a notice": ("leave", set())}


@thorough
@pytest.mark.parametrize(("how", "killed"), TOO_FEW.values(), ids=TOO_FEW)
def test_a_job_with_too_few_waits_for_more(jobs, how, killed):
    job = jobs.start(f"1:after:pushpull:7:{how}", *PREFIX, *AUDIT, workers=2, servers=1, elastic=2, env=WAIT)
    job.wait_for_line("scheduler-0", "1 worker is left, and --min-workers is 2: the job waits up to 60 s for more")
    come(job, 2)
    codes = job.wait()
    assert codes == {name: KILLED if name in {f"worker-{each}" for each in killed} else 0 for name in codes}
    each_sample_once(job)
    views = read(job.folder / "audit/views.json").views
    assert views[-1].members == (0, 2)
    more = {"env": WAIT, "workers": 2, "servers": 1, "elastic": 1}
    replay = jobs.start("", *PREFIX, "--replay", job.folder / "audit/views.json", **more)
    come(replay, 2)
    replay.succeed()
    same(job, replay, (0, 2))


@thorough
@pytest.mark.parametrize(("how", "killed"), TOO_FEW.values(), ids=TOO_FEW)
def test_a_job_that_has_waited_in_vain_ends_with_a_checkpoint(jobs, how, killed):
    env = {**WAIT, "DMLTRAIN_WAIT_FOR_HOSTS": "1"}
    job = jobs.start(f"1:after:pushpull:7:{how}", *PREFIX, workers=2, servers=1, elastic=2, env=env)
    few = "the job ends: 1 worker is left, and --min-workers is 2"
    assert ended(job, rf"{few}: no more have come within \d+ s \(--wait-for-hosts\)")
