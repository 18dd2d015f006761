"""The blocks of ops at an epoch's end (dmltrain/train/epochs.py): a worker is lost before, in or after any of them."""

import pytest

from tests.elastic_job import Row, make_forker, make_jobs  # noqa: F401  (fixtures)

thorough = pytest.mark.thorough
DEATHS = 3  # one in each epoch but the last
WORKERS = DEATHS + 2  # the last one never dies
ROUNDING = ",".join(f"{WORKERS - 1}:round:{epoch}" for epoch in range(DEATHS + 1))
FEW = "--num-examples 40"
NETWORK = f"{FEW} --network resnet --num-layers 8"  # it has statistics of batch norm
OPS = 6  # barriers after the steps and before the sum of statistics, that sum, comparison of weights, save, validation
OPS_OF_ROUNDING = 5 + 14  # and in the comparison the sizes, each array of mlp, and the differences
MOMENTS = {
    "before": ["before:op"],
    "in": ["before:wait", "before:wait for release"],  # whichever the op has: a sum or a barrier
    "with all results": ["before:complete"],
    "after": ["after:complete"],
}
MEMBERS = {"leader": range(DEATHS), "other": range(DEATHS, 0, -1)}  # who dies


def walk(moment, members, first):
    """Faults: in epoch n the n-th of these members dies, at this moment of op `first` + n of the epoch's end."""
    deaths = [(epoch, member, place) for epoch, member in enumerate(MEMBERS[members]) for place in MOMENTS[moment]]
    return ",".join(f"{member}:{place}:{epoch}.{first + epoch}:kill" for epoch, member, place in deaths)


def walks(last, in_ci):
    """Each op up to the last, at each moment, with the leader or another worker; `in_ci` says which CI has."""
    firsts = range(1, last, DEATHS)
    cases = [(moment, members, min(first, last - 2)) for first in firsts for moment in MOMENTS for members in MEMBERS]
    return [pytest.param(*case, marks=thorough if in_ci(n) else pytest.mark.exhaustive) for n, case in enumerate(cases)]


def ops(job):
    """How many ops each epoch's end has."""
    places = [line.split()[0] for line in (job.folder / "trace-0").read_text().splitlines()]
    ends = dict(place.split(".") for place in places)
    return {int(end) for end in ends.values()}


@pytest.mark.parametrize(
    ("options", "rounding", "count"),
    [(NETWORK, "", OPS), pytest.param(FEW, "2:round:0,2:round:1", OPS_OF_ROUNDING, marks=thorough)],
)
def test_the_walks_reach_all_ops(jobs, options, rounding, count):
    job = jobs.start(rounding, *options.split(), "--num-epochs", 2, "--trace", "trace", workers=3, servers=1)
    job.succeed()
    assert ops(job) == {count}


@pytest.mark.parametrize(("moment", "members", "first"), walks(OPS, lambda n: n in (0, 3, 10, 12, 15)))
def test_a_loss_at_each_op_of_each_block(jobs, moment, members, first):
    """In CI each op, each moment, and the leader and another worker."""
    faults = walk(moment, members, first)
    jobs.run(Row(faults, options=f"{NETWORK} --num-epochs {DEATHS + 1}", workers=WORKERS))


@pytest.mark.parametrize(("moment", "members", "first"), walks(OPS_OF_ROUNDING, lambda n: n in (11, 36, 47)))
def test_a_loss_while_weights_that_were_rounded_otherwise_are_replaced(jobs, moment, members, first):
    """The comparison of weights has many ops, and begins again."""
    faults, says = walk(moment, members, first), (f"worker-{WORKERS - 1}: rounded unlike worker",)
    options = f"{FEW} --num-epochs {DEATHS + 1}"
    jobs.run(Row(faults, options=options, workers=WORKERS, servers=1, rounding=ROUNDING, says=says))


@thorough
def test_a_replay_lets_a_worker_go_that_waits_for_a_server(jobs):
    """It declares a sum in the view that ends, and learns of that after the servers, which do not answer. That does not
    keep it from leaving."""
    late = "0:before:op:0.4:until/before/announce/2,0:before:announce:2:until/before/wait/0.4"
    jobs.run(Row("0:before:op:0.4:kill", options=FEW, servers=1, rounding="2:round:0", in_replay=late))
