"""Each kind of fault at each kind of moment, over each way on the wire, with each kind of steps: the job goes on, and
uses each sample once. Where all workers make each step together, a replay has the same weights.

An array of faults and moments, with ways and kinds of steps in turn, so that each pair of any two of these four occurs.
The whole array of faults, moments and kinds of steps is exhaustive, as is that of faults, moments and ways. Each job
has 4 workers, and one server more than it loses.
"""

import itertools
import signal

import pytest

from dmltrain.audit.views_file import read
from tests.elastic_job import (  # noqa: F401
    AUDIT,
    KILLED,
    PREFIX,
    digests,
    each_sample_once,
    make_forker,
    make_jobs,
    ranks,
    replace_schedulers,
    same,
)

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
MOMENTS = {  # -> where that is, and what happens before
    "in mid-step": ("after:{push}:8", []),
    "while the view changes": ("after:freeze:1", ["3:after:{push}:10:kill"]),
    "in validation": ("before:evaluate:5", []),
    "in the checkpoint": ("before:op:{write}", []),  # the others wait for the leader, which writes it
}
AS_LEADER = {"kill": "before:put:2", "leave": "before:put:2", "stop": "before:write:1"}  # in the checkpoint
WAYS = {
    "shared memory": ("shm", []),
    "TCP": ("tcp", []),
    "int8": ("tcp", ["--gc-type", "int8"]),
    "bf16": ("shm", ["--gc-type", "bf16"]),
}


STEPS = {  # -> options; by what gradients are pushed; the op in which all wait for the checkpoint; whether together
    "on workers": ([], "pushpull", 4, True),
    "on servers": (["--update-on-kvstore", "1"], "push", 4, True),
    "dist_ssp": (["--kv-store", "dist_ssp", "--staleness", "1"], "push", 6, False),
    "dist_async": (["--kv-store", "dist_async"], "push", 6, False),
}
TWICE = (0, 2, 3, 1)  # a number of the field of 4 elements, whose sum is the exclusive or, times its element 2


def cells():
    """With the sums of the field, each pair of a way and a kind of steps occurs for each four faults."""
    found, ways, kinds = [], list(WAYS), list(STEPS)
    for row, fault in enumerate(FAULTS):
        for column, moment in enumerate(MOMENTS):
            turn = ways[row % 4 ^ column], kinds[row % 4 ^ TWICE[column]]
            every = [turn, *((way, kinds[0]) for way in ways), *((turn[0], kind) for kind in kinds)]
            for way, kind in dict.fromkeys(every):
                marks = [] if row == 4 * column else [pytest.mark.thorough]  # each moment, way and kind once
                marks = marks if (way, kind) == turn else [pytest.mark.exhaustive]
                name = f"{fault}, {moment}, {way}, {kind}"
                found.append(pytest.param(fault, moment, way, kind, marks=marks, id=name))
    return found


def faults_of(fault, moment, kind):
    place, before = MOMENTS[moment]
    found = [*before]
    for each in FAULTS[fault]:
        member, what = each.split(":")
        at = AS_LEADER[what] if moment == "in the checkpoint" and member == "0" else place
        found.append(f"{member}:{at}:{what}")
    _, push, write, _ = STEPS[kind]
    return [each.format(push=push, write=write) for each in found]


def victims(faults, what):
    """The names of the processes to which this happens."""
    for fault in faults:
        member, *_, action = fault.split(":")
        if "server/" in action and action.startswith("stop") == (what == "stop") and what in ("kill", "stop"):
            yield action.split()[-1].replace("/", "-")
        elif action == what:
            yield f"worker-{member}"


def wake(job, name, survivor):
    """Let a stopped process go on when the job has gone on without it."""
    job.wait_for_line(survivor, f"Removed from the job: {name.replace('-', ' ')}")
    job.processes[name].send_signal(signal.SIGCONT)


def test_each_pair_occurs():
    chosen = [each.values for each in cells() if pytest.mark.exhaustive not in each.marks]
    names = [FAULTS, MOMENTS, WAYS, STEPS]
    for one, other in itertools.combinations(range(4), 2):
        pairs = {(cell[one], cell[other]) for cell in chosen}
        assert pairs == {*itertools.product(names[one], names[other])}


def test_the_smoke_array_has_each_kind_of_moment_way_and_steps():
    _, *found = zip(*(each.values for each in cells() if not each.marks), strict=True)
    assert [set(each) for each in found] == [{*MOMENTS}, {*WAYS}, {*STEPS}]


@pytest.mark.parametrize(("fault", "moment", "way", "kind"), cells())
def test_the_job_goes_on(jobs, fault, moment, way, kind):
    faults, (transport, compression) = faults_of(fault, moment, kind), WAYS[way]
    killed, stopped = set(victims(faults, "kill")), set(victims(faults, "stop"))
    schedulers = len(list(victims(faults, "scheduler")))
    env = {"DMLTRAIN_TRANSPORT": transport, "DMLTRAIN_SCHEDULER_FILE": "scheduler.json"}
    if stopped:
        env["DMLTRAIN_HEARTBEAT_TIMEOUT"] = "3"
    (how, _, _, together), servers = STEPS[kind], 3 if "two servers" in fault else 2
    options = [*compression, *how]
    job = jobs.start(",".join(faults), *PREFIX, *AUDIT, *options, servers=servers, env=env)
    killed |= set(replace_schedulers(job, schedulers))
    for name in stopped:
        wake(job, name, "worker-2")
    codes = job.wait()
    expected = dict.fromkeys(codes, 0) | dict.fromkeys(killed, KILLED) | dict.fromkeys(stopped, 75)
    assert codes == expected, job.outputs()
    assert "Traceback" not in job.outputs()
    each_sample_once(job)
    check_views(job, killed | stopped, set(victims(faults, "leave")))
    finals = [member for member in ranks(job) if "Final weights" in job.output(f"worker-{member}")]
    assert finals and len(digests(job, finals)) == 1
    loses_server = any("server/" in each for each in faults)
    if not together or (loses_server and kind == "on servers"):
        return  # no replay has these weights
    replay = jobs.start("", *PREFIX, "--replay", job.folder / "audit/views.json", *options, servers=servers)
    replay.succeed()
    if way == "int8" and loses_server:  # checkpoints have the residuals of all servers
        assert len(digests(job, finals) | digests(replay, finals)) == 1, replay.outputs()
    else:
        same(job, replay, finals)


def check_views(job, lost, left):
    """The members that are in no later view are those with faults, and those that have left on purpose, as it says."""
    views = read(job.folder / "audit/views.json").views
    gone = {f"worker-{member}" for member in set(views[0].members) - set(views[-1].members)}
    workers = {name for name in lost if name.startswith("worker")}
    assert gone == workers | left, job.outputs()
    assert {f"worker-{each.member}" for view in views for each in view.left} == left - workers, job.outputs()
    assert {f"server-{number}" for number in set(views[0].servers) - set(views[-1].servers)} == lost - workers - {
        name for name in lost if name.startswith("scheduler")
    }
