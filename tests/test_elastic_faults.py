"""Elastic jobs of real processes, which lose, replace and get members at exact moments: the job goes on, and uses each
sample once. Where all workers make each step together, a replay has the same weights. What is judged after each job:
tests/elastic_job.py.

Two tables. The first is an array: each kind of fault at two of the four kinds of moments, with exact moments, ways on
the wire and kinds of steps in turn, so that each pair of any two of kind of moment, way and kind of steps occurs, and
each exact moment. The whole array of faults, kinds of moments and kinds of steps is exhaustive, as is that of faults,
kinds of moments and ways. The second has jobs with something of their own. What happens in any order is in
tests/kvstore/test_simulated.py, which runs thousands of schedules for each job here.
"""

import itertools
import re

import pytest

from tests.elastic_job import Row, come, make_forker, make_jobs, shown  # noqa: F401

FAULTS = {  # -> what members do, at the moment
    "a worker is killed": ["1:kill"],
    "the leader is killed": ["0:kill"],
    "two workers are killed": ["1:kill", "2:kill"],
    "a server is killed": ["1:server/1"],
    "two servers are killed": ["1:server/1", "2:server/2"],
    "the scheduler is killed": ["1:scheduler"],
    "worker and server are killed": ["1:kill", "2:server/1"],
    "worker and scheduler are killed": ["1:kill", "2:scheduler"],
    "server and scheduler are killed": ["1:server/1", "2:scheduler"],
    "a worker is stopped": ["1:stop"],
    "the leader is stopped": ["0:stop"],
    "a server is stopped": ["1:stop server/1"],
    "a worker leaves": ["1:leave"],
    "the leader leaves": ["0:leave"],
    "a worker leaves, another is killed": ["1:leave", "2:kill"],
}
# Ops of a job of 4 workers with the defaults of programs/elastic.py: 1 to 7 rounds, 8 and 9 barriers, 10 comparison of
# weights, 11 save, 12 validation; 13 to 24 the same. A round has a push for each of two buckets and, where workers make
# the steps, one for a receipt: "push 3.2" is the second one of the third round.
MOMENTS = {  # kind -> exact moments of jobs whose workers make steps together, and of the others
    "in mid-step": {
        "between two pushes": ("after:push 3.1", "after:push 3.1"),
        "in the first round": ("before:push 1.1", "before:push 1.1"),
        "in the forward pass": ("before:train_step:3", "before:train_step:3"),
        "between push and value": ("after:push 3.2", "after:push 3.2"),
        "with values that it has not recognised": ("before:complete:4", "before:push 4.1"),
        "after a round": ("after:complete:3", "after:push 4.2"),
        "when all samples are used": ("before:push 7.1", "before:op:1"),
    },
    "while the view changes": {
        "after its answer": ("after:freeze:1",) * 2,
        "before its answer": ("before:freeze:1",) * 2,
        "before it has the view": ("before:announce:2",) * 2,
        "with a view that it has not entered": ("after:announce:2",) * 2,
        "before it enters": ("before:enter:1",) * 2,
        "after it has entered": ("after:enter:2",) * 2,
    },
    "at the end of an epoch": {
        "in validation": ("before:evaluate:5",) * 2,
        "in a barrier": ("before:barrier:2",) * 2,
        "in the sum of validation": ("before:wait:0.5", "before:evaluate:1"),
        "when a barrier is passed": ("after:wait for release:1",) * 2,
    },
    "in the checkpoint": {"in the checkpoint": ("before:op:4", "before:op:6")},  # others wait for the leader
}
BEFORE = {"while the view changes": ["3:after:push 4.1:kill"]}
AS_LEADER = {"kill": "before:put:2", "leave": "before:put:2", "stop": "before:write:1"}  # in the checkpoint
WAYS = ["shared memory", "TCP", "int8", "bf16"]
STEPS = ["on workers", "on servers", "dist_ssp", "dist_async"]  # dist_local has rows of the second table
TWICE = (0, 2, 3, 1)  # a number of the field of 4 elements, whose sum is the exclusive or, times its element 2
thorough, exhaustive = pytest.mark.thorough, pytest.mark.exhaustive


def cells():
    """With the sums of the field, each pair of a way and a kind of steps occurs for each four faults. CI has every
    other cell, like the black fields of a chessboard that is shifted by one after each four faults."""
    found = []
    for row, fault in enumerate(FAULTS):
        for column, (kind, exact) in enumerate(MOMENTS.items()):
            moment = [*exact][row // 2 % len(exact)]
            turn = WAYS[row % 4 ^ column], STEPS[row % 4 ^ TWICE[column]]
            every = [turn, *((way, STEPS[0]) for way in WAYS), *((turn[0], steps) for steps in STEPS)]
            for way, steps in dict.fromkeys(every):
                marks = [] if row == 4 * column else [thorough]  # each kind of moment, way and kind of steps once
                marks = marks if (way, steps) == turn and (row // 4 + row + column) % 2 == 0 else [exhaustive]
                name = f"{fault}, {moment}, {way}, {steps}"
                found.append(pytest.param(fault, kind, moment, way, steps, marks=marks, id=name))
    return found


def faults_of(fault, kind, moment, steps):
    found = [*BEFORE.get(kind, [])]
    for each in FAULTS[fault]:
        member, what = each.split(":")
        place = MOMENTS[kind][moment][steps.startswith("dist")]
        found.append(f"{member}:{AS_LEADER[what] if (kind, member) == ('in the checkpoint', '0') else place}:{what}")
    name, pushes = ("pushpull", 3) if steps == "on workers" else ("push", 2)

    def numbered(found):
        return f"{name}:{(int(found[1]) - 1) * pushes + int(found[2])}"

    return ",".join(re.sub(r"push (\d)\.(\d)", numbered, each) for each in found)


def test_each_pair_occurs():
    chosen = [cell.values for cell in cells() if exhaustive not in cell.marks]
    assert {name: [cell[0] for cell in chosen].count(name) for name in FAULTS} == dict.fromkeys(FAULTS, 2)
    for one, other in itertools.combinations((1, 3, 4), 2):
        pairs = {(cell[one], cell[other]) for cell in chosen}
        assert pairs == {*itertools.product(*({cell[each] for cell in chosen} for each in (one, other)))}
    assert {cell[2] for cell in chosen} == {name for exact in MOMENTS.values() for name in exact}


@pytest.mark.parametrize(("fault", "kind", "moment", "way", "steps"), cells())
def test_the_job_goes_on(jobs, fault, kind, moment, way, steps):
    faults = faults_of(fault, kind, moment, steps)
    jobs.run(Row(faults, steps, way, workers=4, servers=3 if "two servers" in fault else 2))


KILL = "1:before:complete:4:kill"
PUSHED = "1:after:push:5:kill"  # of a worker's own step
IN_ROUND_5 = "1:after:pushpull:9:server/1"
INVITED = "0:before:train_step:{}:until/after/invite/{}"  # the leader goes on when it has heard of so many newcomers
HEARD = INVITED.format(12, 1)  # or of the notice of one that leaves
JOINS = INVITED.format(6, 1)
WAIT = "WAIT_FOR_HOSTS=60 MAX_WORKERS=4"
LACK = [f"{member}:before:complete:4:until/after/freeze/1" for member in (1, 2)]  # they do not recognise what they have
LACK = ",".join(LACK)
RESNET = "--network resnet --num-layers 8"
SIZES = "--random-crop 1 --image-shape 1,6,6:0 1,8,8:1 --val-image-shape 1,10,10"
HANDS_OVER = f"{KILL.replace('kill', 'leave')},{HEARD}"
TAKES_OVER = "worker-2: Compression: worker 0 takes over the residuals of workers 1"
RESIDUALS_LOST = "residuals of these workers are lost"
ZERO = "worker-0: Compression: the servers' residuals begin at zero in view 2"
REPLACED = [(0, 1), (0,), (0, 1)]
STATISTICS = "Batch-norm statistics of worker 1 since the last merge are lost; weights do not need them"
STATE = "the optimizer's state of"
EACH_STEP = "--server-snapshot 0"
# With dist_local an epoch of 3 workers has 9 steps, and an average after each three of them: 3 rounds of 3 pushes.
BETWEEN_AVERAGES = "1:before:train_step:5:kill"
# Iterations of a job of 3 workers: 9 in the first epoch, 2 in the second. The first snapshot is after 3 rounds and a
# test.
STOPS = "--snapshot 3 --test-interval 2 --monitor 2 --max-iter 11"
SEVERAL = "--macrobatch-size 30 --swa-from 1"  # three batches of three workers, and a last step of fewer
AVERAGED = "--clip-gradient-norm 0.1 --ema-decay 0.9 --mixup 0.4 --cutmix 1 --val-flip"
HALVED = f"--dtype float16 {AVERAGED}"
IN_TEST = {
    "the leader in the middle of a checkpoint",
    "mistakes of their own end only these workers",
    "a server is killed, and who lacks its results gets the weights from another",
    "residuals are handed over",
    "a server is replaced",
    "a worker joins",
}
JOBS = {
    # Workers are lost.
    "the leader in the middle of a checkpoint": Row("0:before:put:2:kill", way="int8"),  # it has residuals
    "in the last op": Row("2:before:complete:24:kill", late=True),
    "all but one": Row(f"{KILL},0:before:complete:5:kill,3:after:pushpull:24:kill", workers=4),
    "each of the others at another moment of the change": Row(
        f"{KILL},2:after:freeze:1:kill,0:after:announce:2:kill,3:after:enter:3:kill", workers=5
    ),
    "a leader learns of two views at once": Row("1:before:pushpull:1:kill,0:after:start:1:until/after/announce/2"),
    "a leader learns of the second and third view at once": Row(
        "1:before:train_step:4:kill,2:after:enter:2:kill,0:after:train_step:3:until/after/announce/3", workers=4
    ),
    # Before and after the servers know that the worker leaves. Perhaps the others are at their end as well.
    "at the end": Row("1:before:close:1:kill,2:before:bye:1:kill", workers=4, late=True),
    # One prepares images, on another thread, one is in validation.
    "mistakes of their own end only these workers": Row(
        "2:before:training:9:own,3:before:evaluate:5:own",
        workers=4,
        codes={"worker-2": 1, "worker-3": 1},
        says=[f"worker-{member}: RuntimeError: this worker's own mistake" for member in (2, 3)],
        silent=[STATISTICS],  # mlp has none
    ),
    # Snapshots and tests in the middle of an epoch.
    "the leader in the middle of a snapshot": Row("0:before:put:2:kill", options=STOPS, way="int8"),
    "a worker before a snapshot": Row("1:before:barrier:2:kill", options=f"{STOPS} {RESNET}", workers=2),
    "a worker in the last round before a test": Row("1:after:pushpull:5:kill", options=STOPS),
    "a worker in the run's last round": Row("1:after:pushpull:32:kill", options=STOPS, late=True),
    "a worker in a test in mid-epoch, with steps of their own": Row(
        "1:before:evaluate:1:kill", "dist_ssp", options=STOPS
    ),
    "a server in the middle of a snapshot": Row(
        "0:before:put:2:server/1", "on servers", options=f"{STOPS} {EACH_STEP}", replayed=True
    ),
    "a worker joins before a test": Row(INVITED.format(2, 1), options=STOPS, come=(3,)),
    "several batches a step": Row("1:after:pushpull:4:kill", options=f"{SEVERAL} --snapshot 2"),
    "the leader in the middle of a snapshot, with local steps": Row("0:before:put:2:kill", "dist_local", "int8", STOPS),
    "several batches a local step, and one joins": Row(
        JOINS.replace(":6:", ":2:"),
        "dist_local",
        options=SEVERAL,
        come=(3,),  # a step has several batches
    ),
    "several batches a step, and one joins": Row(JOINS.replace(":6:", ":2:"), "dist_ssp", options=SEVERAL, come=(3,)),
    # An average of weights is in the checkpoints, and its digest in the log. The first steps overflow, and all halve
    # the loss scale.
    "float16, clipped, with an average of weights": Row(f"{KILL},{JOINS}", options=HALVED, come=(3,)),
    "float16, and who lacks results gets step and average from another": Row(
        f"0:after:complete:4:server/1,{LACK}", options=HALVED, views={"behind": [(1, 2)]}
    ),
    "clipped on servers": Row(PUSHED, "on servers", options=AVERAGED),
    "batch statistics": Row(
        "1:after:pushpull:7:kill", options=f"{RESNET} {SIZES}", workers=2, says=[f"worker-0: {STATISTICS}"]
    ),
    "tls": Row("1:after:pushpull:8:kill", way="tls"),
    # A round that is aborted leaves nothing in residuals: the replay, where it is not aborted, has the same weights,
    # and residuals in its checkpoints.
    "2bit with a threshold, whose sums depend on the number of workers": Row(
        f"{KILL},{JOINS}", way="2bit", options="--gc-threshold 0.02", come=(3,), says=[ZERO]
    ),
    "topk": Row("1:after:pushpull:7:kill", way="topk", says=[ZERO]),
    "adam on servers": Row(PUSHED, "on servers", options="--optimizer adam"),
    "adam and 2bit with dist_ssp": Row(PUSHED, "dist_ssp", "2bit", "--staleness 2 --optimizer adam"),
    "one in the view without the other": Row(f"{PUSHED},2:before:exchange:1:kill", "dist_ssp", workers=4),
    "a worker between averages": Row(
        BETWEEN_AVERAGES, "dist_local", says=["any: View 2 after op 1: workers 0, 2; 12 "]
    ),
    "a worker in an average": Row("1:before:complete:2:kill", "dist_local", "int8"),
    # Servers are lost.
    "a server in the last op": Row("2:before:complete:24:server/1", late=True),
    # Worker 0 holds op 4 when it kills the server, the others do not.
    "a server is killed, and who lacks its results gets the weights from another": Row(
        f"0:after:complete:4:server/1,{LACK}",
        views={"behind": [(1, 2)]},
        says=["worker-2: The step of this worker was made by the others"],
    ),
    "a server is killed, and who lacks its results gets statistics": Row(
        f"0:after:complete:4:server/1,{LACK}", options=RESNET, views={"behind": [(1, 2)]}
    ),
    "a server is killed, and who lacks the average gets it from another": Row(
        f"0:after:complete:2:server/1,{LACK.replace(':4:', ':2:')}", "dist_local", views={"behind": [(1, 2)]}
    ),
    # It waits in the barrier that follows.
    "who holds the last round of an epoch alone gives its step to the others": Row(
        f"0:after:complete:7:server/0,{LACK.replace(':4:', ':7:')}", views={"behind": [(1, 2)]}
    ),
    "a server when all have told what they hold": Row(f"{PUSHED},0:before:settle:1:server/1", "dist_ssp"),
    "a lost server's state was copied after each step": Row(
        "1:before:evaluate:1:server/1", "on servers", options=EACH_STEP, silent=[STATE], replayed=True
    ),
    "a server before all know of the step": Row("1:before:complete:5:server/1", "on servers", options=EACH_STEP),
    # The first copy is made after the first step, the next one is not due.
    "a server long after its last copy": Row(
        "1:before:evaluate:1:server/1",
        "on servers",
        options="--server-snapshot 1000",
        says=[rf"any: {STATE} .* is 8 steps older than the weights: it is a lost server's last snapshot"],
        silent=["lost with their server"],
    ),
    "a server long after its last copy, with steps of their own": Row(
        "1:before:evaluate:1:server/1",
        "dist_ssp",
        options="--staleness 0 --server-snapshot 1000",
        says=[rf"any: {STATE} .* older than the weights"],
        silent=["lost with their server"],
    ),
    # Workers leave.
    "residuals are handed over": Row(
        HANDS_OVER, way="int8", says=[TAKES_OVER], silent=[RESIDUALS_LOST], views={"hands_over": [(1,)]}
    ),
    "bf16 has nothing to hand over": Row(
        HANDS_OVER, way="bf16", silent=["takes over the residuals"], views={"hands_over": []}
    ),
    "the leader leaves with residuals, dist_ssp": Row(f"0:after:push:8:leave,{HEARD}", "dist_ssp", "int8"),
    "all but the last leave": Row(
        "0:after:pushpull:7:leave,1:before:complete:4:leave,2:after:pushpull:2:leave,"
        "3:before:train_step:14:until/after/announce/2",
        way="int8",
        workers=4,
    ),
    "a worker leaves after an average": Row(
        "1:before:train_step:5:leave,0:before:train_step:6:until/after/invite/1",
        "dist_local",
        views={"members": [(0, 1, 2), (0, 2)], "base": [2]},
    ),
    "the leader leaves with residuals, dist_local": Row(f"0:before:train_step:5:leave,{HEARD}", "dist_local", "int8"),
    # No later view tells it of the loss. It would wait for longer than the test does.
    "who leaves does not wait for a server that is lost meanwhile": Row(
        f"1:after:pushpull:7:leave,1:before:close:1:server/1,{HEARD}", env="LEAVE_SECONDS=600"
    ),
    # The newcomer joins before the other leaves, after that, or in the same view. In the last case the leader is
    # invited once, and hears of the newcomer a second time with the view.
    "one leaves and another comes": Row(
        "1:before:complete:2:leave,0:before:train_step:12:until/after/newcomer/2", workers=2, come=(2,)
    ),
    # The leader begins no round before that.
    "with a second notice one ends as lost": Row(
        "1:before:complete:3:leave,1:after:complete:3:leave,0:after:complete:3:until/after/announce/2",
        codes={"worker-1": -15},
    ),
    "who does not leave in time ends as lost": Row(
        "1:before:complete:3:leave,0:after:complete:3:until/after/announce/2",
        env="LEAVE_SECONDS=1",
        codes={"worker-1": -15},
        says=[r"worker-1: Not left within 1 s \(DMLTRAIN_LEAVE_SECONDS\)"],
    ),
    # One dies while worker 1 hands over. The leader waits before the next round until the death is known.
    **{
        f"while residuals are handed over, {death}": Row(
            f"{HANDS_OVER},{death}",
            way="int8",
            workers=4,
            says=[
                TAKES_OVER.replace("worker-2", "worker-3"),
                *([rf"worker-3: {RESIDUALS_LOST}: {whose}\n"] * bool(whose)),
            ],
            silent=[] if whose else [RESIDUALS_LOST],
        )
        for death, whose in {
            "1:before:exchange:1:kill": "1",
            "1:after:settle:1:kill": "",
            "0:before:exchange:1:kill": "0",
        }.items()
    },
    **{
        f"a job with too few after {what} waits for more": Row(
            fault,
            steps,
            workers=2,
            servers=1,
            elastic=2,
            env=WAIT,
            come=(2,),
            come_after="scheduler-0: 1 worker is left, and --min-workers is 2: the job waits up to 60 s for more",
        )
        for what, fault, steps in (
            ("a loss", "1:after:pushpull:7:kill", "on workers"),
            ("a notice", "1:after:push:7:leave", "dist_ssp"),
        )
    },
    # Lost servers are replaced.
    "a server is replaced": Row(
        f"{IN_ROUND_5},{INVITED.format(7, 1)}",
        servers_come=(1,),
        views={"servers": REPLACED, "joined_servers": [(1,)]},
        says=["worker-2: New in view 3: servers 1", "scheduler-0: was lost: end of stream; the job goes on without it"],
    ),
    "a server is replaced, and gets statistics, with auth and fp16": Row(
        f"{IN_ROUND_5},{INVITED.format(7, 1)}",
        way="auth",
        options=f"{RESNET} --gc-type fp16",
        servers_come=(1,),
        views={"servers": REPLACED},
        silent=["residuals begin at zero"],
    ),
    # Some of the workers cannot connect to it then, and wait for the view without it.
    "the replacement is killed while it joins": Row(
        f"{IN_ROUND_5},{INVITED.format(7, 1)},1:after:announce:3:server/1,{INVITED.format(12, 2)}",
        servers_come=(1, 1),
        views={"servers": [*REPLACED, *REPLACED[1:]], "joined_servers": [(1,), (1,)]},
    ),
    # The replacement joins before the worker is removed, after that, or with the same view.
    "a server is replaced and a worker lost": Row(
        f"{IN_ROUND_5},2:before:complete:5:kill,0:before:train_step:9:until/after/newcomer/1",
        servers_come=(1,),
        views={"joined_servers": [(1,)]},
    ),
    "the only server is replaced": Row(
        "1:before:complete:4:server/0",
        servers=1,
        servers_come=(0,),
        views={"servers": [(0,), (0,)], "joined_servers": [(0,)]},
        says=["scheduler-0: no server is left, and the job waits for a replacement"],
    ),
    "the only server is replaced in the middle of a checkpoint": Row(
        "0:before:put:2:server/0", servers=1, servers_come=(0,), views={"servers": [(0,), (0,)]}
    ),
    "who lacks the results of the only server gets the weights from another": Row(
        f"0:after:complete:4:server/0,{LACK}", servers=1, servers_come=(0,), views={"behind": [(1, 2)]}
    ),
    "both servers are killed, and one comes back": Row(
        "1:after:pushpull:8:server/0,2:after:pushpull:8:server/1", servers_come=(1,)
    ),
    # The scheduler is killed after the server's replacement has joined; then a worker comes, and another is killed.
    "the next scheduler and who comes later know where a replacement is": Row(
        f"{IN_ROUND_5},{INVITED.format(7, 1)},1:before:train_step:10:scheduler,{INVITED.format(13, 2)},"
        "2:before:complete:19:kill",
        servers_come=(1,),
        come=(3,),
        come_after="scheduler-0-2: goes on after view 3",
    ),
    "the only server is replaced, and nothing of its state lost": Row(
        "1:before:evaluate:1:server/0",
        "on servers",
        options=EACH_STEP,
        workers=2,
        servers=1,
        servers_come=(0,),
        silent=[STATE],
    ),
    "a replacement gets the state from the other servers": Row(
        "1:before:evaluate:1:server/1", "on servers", options=EACH_STEP, workers=2, servers_come=(1,)
    ),
    "one of two servers is replaced, with steps of their own": Row(
        "1:after:push:7:server/1", "dist_ssp", options=f"--staleness 2 {EACH_STEP}", workers=2, servers_come=(1,)
    ),
    # The scheduler is lost.
    "the scheduler after the first view": Row("0:after:start:1:scheduler"),
    "the scheduler in the last op": Row("2:before:complete:24:scheduler"),
    "the scheduler when a worker has left the servers": Row("1:before:bye:1:scheduler"),
    "the scheduler when one has a view": Row(f"{KILL},0:before:announce:2:scheduler", env="HEARTBEAT_TIMEOUT=6"),
    "the scheduler when all may have the next view": Row(
        f"{KILL},2:after:enter:2:scheduler", env="HEARTBEAT_TIMEOUT=6", workers=4
    ),
    "two workers before the scheduler comes back": Row(
        f"{KILL},0:after:freeze:1:scheduler,2:before:introduce:1:kill", env="HEARTBEAT_TIMEOUT=6", workers=4
    ),
    # The second one before it has seen anybody, or in the next epoch.
    "the scheduler twice": Row(
        "1:before:complete:4:scheduler,2:before:complete:15:scheduler",
        says=["scheduler-0-3: incarnation 3 of the scheduler goes on after view 2"],
    ),
    "server and scheduler, and who lacks results gets the step from another": Row(
        f"0:after:complete:4:scheduler,0:before:train_step:5:server/1,{LACK}", views={"behind": [(1, 2)]}
    ),
    # Workers join.
    "a worker joins": Row(INVITED.format(3, 1), come=(3,), views={"members": [(0, 1, 2), (0, 1, 2, 3)]}),
    "one that comes before the first view joins after it": Row(
        f"0:before:start:1:go on once come,{INVITED.format(1, 1)}",
        come=(3,),
        views={"members": [(0, 1, 2), (0, 1, 2, 3)], "joined": [(3,)]},
    ),
    "two join a job that loses one": Row(f"{INVITED.format(3, 2)},1:before:complete:4:kill", come=(3, 4)),
    "one is lost while it gets the state of training": Row(
        f"{INVITED.format(3, 1)},3:before:complete:1:kill",
        come=(3,),
        views={"members": [(0, 1, 2), (0, 1, 2, 3), (0, 1, 2)]},
    ),
    "more workers than samples in a step": Row(
        INVITED.format(3, 1), options="--batch-size 1 --num-examples 40", workers=2, come=(2, 3, 4)
    ),
    **{
        f"one joins and another is lost, {steps}": Row(f"{PUSHED},{JOINS}", steps, come=(3,))
        for steps in ("on servers", "dist_ssp")
    },
    # The newcomer has the others' state, and takes part in the next deal.
    "another is lost before a newcomer has made a step": Row(f"2:after:settle:1:kill,{JOINS}", "dist_async", come=(3,)),
    # Lost workers are replaced.
    "a worker is replaced twice": Row(
        f"{KILL},{JOINS},{INVITED.format(20, 2)}",
        options="--num-epochs 3",
        workers_come=((1, KILL), (1, "")),
        views={"joined": [(1,), (1,)], "members": [(0, 1, 2), (0, 2)] * 2 + [(0, 1, 2)]},
        says=["worker-1-3: Final weights"],
    ),
    # In a replay, too, where the worker is the same process as before.
    "a replacement begins without residuals": Row(f"{KILL},{JOINS}", way="int8", servers=1, workers_come=((1, ""),)),
    # It has the outer momentum, and an inner one of its own.
    "a worker is replaced between averages": Row(
        f"{BETWEEN_AVERAGES},{INVITED.format(9, 1)}", "dist_local", workers_come=((1, ""),)
    ),
    # Its files of the audit, and the list of all views, go on.
    "the leader is replaced": Row(
        "0:before:complete:4:kill,1:before:train_step:6:until/after/invite/1",
        workers=2,
        servers=1,
        workers_come=((0, ""),),
        views={"members": [(0, 1), (1,), (0, 1)]},
        says=[r"worker-1: New in view 3: workers 0\n", "worker-0-2: Final weights"],
    ),
}


@pytest.mark.parametrize("name", [pytest.param(each, marks=[] if each in IN_TEST else thorough) for each in JOBS])
def test_a_job_with(jobs, name):
    jobs.run(JOBS[name])


def test_a_newcomer_that_is_ready_in_the_last_step_ends_with_the_job(jobs):
    faults = f"{INVITED.format(50, 1)},1:before:start:1:go on once 0/before/train_step/50"
    job = jobs.start(faults, workers=1, env={"DMLTRAIN_MAX_WORKERS": "2"})
    come(job, 1)
    job.succeed()
    assert "part has ended: the job has come to its end" in job.output("worker-1"), job.outputs()


@thorough
def test_a_worker_that_is_behind_dies_before_it_has_the_step(jobs):
    faults = f"0:after:complete:4:server/1,{LACK},2:before:enter:1:kill"
    job = jobs.run(Row(faults, workers=4))
    assert shown(job, "behind") in ([(1, 2)], [(1, 2, 3)], [(1, 2), (1,)])
