"""A script trains as in one process, or it is refused before the first wrong step: scripts as users write them
(tests/backends/everyday/), as two workers of a real job beside plain torch in one process."""

import itertools

import pytest

from tests.backends.everyday.run import OPTIONS

RACES, SECONDS = 30, 3600.0
CHOSEN = list(zip(itertools.cycle(["shm", "tcp"]), OPTIONS, strict=False))
OTHERS = [case for case in itertools.product(["shm", "tcp"], OPTIONS) if case not in CHOSEN]


def found(job):
    """What both workers have found of each case."""
    job.succeed(SECONDS)
    one, other = ({result["case"]: result["found"] for result in job.results(worker)} for worker in range(2))
    assert one.keys() == other.keys()
    return {name: {one[name], other[name]} for name in one}


def wrong(cases):
    return {name: said for name, said in cases.items() if said != {"right"}}


@pytest.mark.parametrize(
    "transport, on", [*CHOSEN, *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in OTHERS)]
)
def test_workers_train_what_one_process_trains(start_forked, transport, on):
    cases = found(start_forked("everyday.py", on, env={"DMLTRAIN_TRANSPORT": transport}))
    assert cases and wrong(cases) == {}


@pytest.mark.exhaustive
@pytest.mark.timeout(0)
@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_it_does_not_matter_who_is_faster(start_forked, transport):
    cases = found(start_forked("everyday.py", "workers", RACES, env={"DMLTRAIN_TRANSPORT": transport}))
    assert len(cases) > 5 and wrong(cases) == {}
