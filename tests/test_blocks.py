"""The blocks of ops at an epoch's end (dmltrain/epochs.py): a worker is lost before, in or after any of their ops."""

import itertools

import pytest

from tests.elastic_job import make_forker, make_jobs  # noqa: F401  (fixtures)

thorough = pytest.mark.thorough
WORKERS = 8
ROUNDING = ",".join(f"{WORKERS - 1}:round:{epoch}" for epoch in range(WORKERS))
FEW = ["--num-examples", 40]
NETWORK = [*FEW, "--network", "resnet", "--num-layers", 8]  # it has statistics of batch norm
OPS = 6  # barriers after the steps and before the sum of statistics, that sum, comparison of weights, save, validation
OPS_OF_ROUNDING = 5 + 14  # and in the comparison the sizes, each array of mlp, and the differences
MOMENTS = {
    "before": ["before:op"],
    "in": ["before:wait", "before:wait for release"],  # whichever the op has: a sum or a barrier
    "with all results": ["before:complete"],
    "after": ["after:complete"],
}
MEMBERS = {"leader": range(OPS), "other": range(OPS, 0, -1)}  # who dies; the last one never does


def walk(moments, members, first=0):
    """Faults: in epoch n the n-th of these members dies, at these moments of op `first` + n of the epoch's end."""
    return ",".join(
        f"{member}:{moment}:{epoch}.{first + epoch + 1}:kill"
        for epoch, member in enumerate(members)
        for moment in moments
    )


def ops(job):
    """How many ops each epoch's end has."""
    places = [line.split()[0] for line in (job.folder / "trace-0").read_text().splitlines()]
    ends = dict(place.split(".") for place in places)
    return {int(each) for each in ends.values()}


@pytest.mark.parametrize(
    ("options", "rounding", "count"),
    [(NETWORK, "", OPS), pytest.param(FEW, "2:round:0,2:round:1", OPS_OF_ROUNDING, marks=thorough)],
)
def test_the_walks_reach_all_ops(jobs, options, rounding, count):
    job = jobs.start(rounding, *options, "--num-epochs", 2, "--trace", "trace", workers=3, servers=1)
    job.succeed()
    assert ops(job) == {count}


WALKS = [*itertools.product(MOMENTS, MEMBERS)]
IN_CI = [*zip(MOMENTS, [*MEMBERS] * 2, strict=True)]  # each moment


@pytest.mark.parametrize(
    ("moment", "members"),
    [pytest.param(*each, marks=thorough if each in IN_CI else pytest.mark.exhaustive) for each in WALKS],
)
def test_a_loss_at_each_op_of_each_block(jobs, moment, members):
    """A worker in each epoch but the last, each in another op."""
    jobs.survives(walk(MOMENTS[moment], MEMBERS[members]), *NETWORK, "--num-epochs", OPS + 1, workers=WORKERS)


FIRST = [2, 8, 13]
CASES = [*itertools.product(FIRST, MOMENTS, MEMBERS)]
ROUNDED_IN_CI = [(first, *each) for first, each in zip(itertools.cycle(FIRST), IN_CI, strict=False)]


@pytest.mark.parametrize(
    ("first", "moment", "members"),
    [pytest.param(*each, marks=thorough if each in ROUNDED_IN_CI else pytest.mark.exhaustive) for each in CASES],
)
def test_a_loss_while_weights_that_were_rounded_otherwise_are_replaced(jobs, moment, members, first):
    """The comparison of weights has many ops, and begins again."""
    faults = walk(MOMENTS[moment], [*MEMBERS[members]][: OPS_OF_ROUNDING - first], first)
    job = jobs.survives(faults, *FEW, "--num-epochs", OPS + 1, workers=WORKERS, rounding=ROUNDING)
    assert "rounded unlike worker" in job.output(f"worker-{WORKERS - 1}")


@thorough
def test_a_replay_lets_a_worker_go_that_waits_for_a_server(jobs):
    """It declares a sum in the view that ends, and learns of that after the servers, which do not answer. That does not
    keep it from leaving."""
    late = "0:before:op:0.4:until/before/announce/2,0:before:announce:2:until/before/wait/0.4"
    jobs.survives("0:before:op:0.4:kill", *FEW, workers=3, servers=1, rounding="2:round:0", in_replay=late)
