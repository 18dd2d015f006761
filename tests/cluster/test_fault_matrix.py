"""Every fault in every phase of a real job on three hosts: how it ends, when, with which words, and what is left.

The cells are tried side by side, each on a test bed of its own, as they mostly wait; each test judges one of them.
With -rA pytest shows the matrix. `make test` tries every fault after the agents' start, and every phase, way to
reach hosts and host; .ci/run every two of kind of fault, phase, way and host; `make test-all` all cells.
"""

import os
import queue
import re
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cluster.cells import (
    AGENT_SECONDS,
    CELLS,
    CUT_CELLS,
    CUTS,
    END_SECONDS,
    KINDS,
    SILENCING,
    WAYS,
    WORK_SECONDS,
    Cell,
)
from tests.cluster.conftest import NAME
from tests.cluster.faults import STRIKES
from tests.cluster.layout import Settings
from tests.cluster.testbed import Testbed
from tests.cluster.trial import HOSTS, ROOT, WORKERS, Outcome, Trial
from tests.forked_job import PLAIN, forker
from tests.tiers import tiered

AT_ONCE = 4  # test beds: with more, ends come too late on two cores
LEAVING_SECONDS = 15.0  # for an agent to end when its last word is said
TRIAL_SECONDS = 250.0  # for the longest queue

pytestmark = pytest.mark.timeout(TRIAL_SECONDS + 30)


@pytest.fixture(scope="module")
def trials(request: pytest.FixtureRequest, needs_testbed: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    """`trials(cell)` -> its outcome. The cells that tests have been chosen for are tried side by side."""
    chosen = [item.callspec.params["cell"] for item in request.session.items if item.path == request.path]
    at_once = 1 if _shared_out(request.config) else min(AT_ONCE, len(chosen))
    folder = tmp_path_factory.mktemp("matrix")
    beds: queue.SimpleQueue[Testbed] = queue.SimpleQueue()
    made = [Testbed(f"{NAME}{os.getpid()}_{number}") for number in range(at_once)]
    for bed in made:
        beds.put(bed)
    forker(PLAIN)  # before threads ask for it
    settings = Settings(hosts=3, share=tuple({str(ROOT), sys.prefix, sys.base_prefix, str(folder)}))

    def attempt(cell: Cell) -> Outcome:
        """Once; again where a starved machine may be to blame: a cut that heals, as TCP's pause is a multiple of what
        was measured, and an end that came too late, which may be tried three times."""
        outcome = once(cell, "")
        if (cell.fault == "healing link" and outcome.code) or late(outcome):
            outcome = once(cell, "-again")
        return once(cell, "-once-more") if late(outcome) else outcome

    def late(outcome: Outcome) -> bool:
        return outcome.seconds is not None and outcome.seconds >= _limit(outcome)

    def once(cell: Cell, suffix: str) -> Outcome:
        bed = beds.get()
        try:
            bed.up(settings)
            bed.sweep()
            return Trial(cell, bed, _made(folder / (re.sub(r"\W+", "-", str(cell)) + suffix))).run(STRIKES[cell.fault])
        except Exception:
            return Outcome(cell, trouble=traceback.format_exc())
        finally:
            beds.put(bed)

    with ThreadPoolExecutor(len(made)) as pool:
        try:
            early = {} if at_once == 1 else {cell: pool.submit(attempt, cell) for cell in chosen if not _lacking(cell)}
            yield lambda cell: (early.get(cell) or pool.submit(attempt, cell)).result(TRIAL_SECONDS)
        finally:
            pool.shutdown(cancel_futures=True)
            for bed in made:
                bed.down()


def _shared_out(config: pytest.Config) -> bool:
    """Whether pytest-xdist gives the cells to several processes, each of which sees all of them in its session."""
    return "PYTEST_XDIST_WORKER" in os.environ and not config.getoption("loadgroup", False)


def _lacking(cell: Cell) -> str:
    """The program that the cell needs, where it is not installed."""
    program, _ = WAYS[cell.way]
    return program if program and not shutil.which(program) else ""


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def cells() -> list:
    """`make test` tries each cut and each pair of processes once, .ci/run twice."""
    by_distance = [], pytest.mark.thorough, pytest.mark.exhaustive
    cut_cells = [
        pytest.param(cell, id=str(cell), marks=by_distance[(place - row) % 3])
        for row, across in enumerate(CUT_CELLS)
        for place, cell in enumerate(across)
    ]
    return cut_cells + tiered(
        CELLS,
        lambda cell: (cell.fault, cell.phase, cell.way, cell.host),
        name=str,
        few=lambda cell: (
            cell.phase == "before" or cell.fault,
            cell.phase,
            cell.fault not in SILENCING and cell.way,  # whose end over mpirun comes close to END_SECONDS
            cell.host,
        ),
        paired=lambda cell: (KINDS[cell.fault], cell.phase, cell.way, cell.host),
    )


@pytest.mark.parametrize("cell", cells())
def test_a_fault(trials: Callable[[Cell], Outcome], cell: Cell):
    if lacking := _lacking(cell):
        pytest.skip(f"{lacking} is missing")
    outcome = trials(cell)
    print(outcome.row)
    if cell.pair and (named := re.search(cell.cause.format(pid=outcome.pid, host=cell.host) + ".*", outcome.words)):
        print(f"    {named[0]}")
    assert not outcome.trouble, outcome
    assert outcome.happened, f"the fault did not happen\n{outcome}"
    assert outcome.code == cell.expected.code, outcome
    for judge in (_ends_in_time, _says_why, _leaves_nothing):
        judge(outcome)
    if more := ALSO.get(cell.fault):
        more(outcome)


def _ends_in_time(outcome: Outcome) -> None:
    assert outcome.seconds is not None and outcome.seconds < _limit(outcome), outcome


def _limit(outcome: Outcome) -> float:
    return outcome.cut_seconds + WORK_SECONDS if outcome.cell.fault == "healing link" else END_SECONDS


def _says_why(outcome: Outcome) -> None:
    cell, lines = outcome.cell, outcome.words.splitlines()
    known = {"pid": outcome.pid, "host": cell.host}
    assert "Traceback" not in outcome.words, outcome
    assert re.search(cell.cause.format(**known), outcome.words), outcome
    if cell.last:
        assert re.fullmatch(cell.last.format(**known), lines[-1]), outcome


def _leaves_nothing(outcome: Outcome) -> None:
    """Of the job's processes none when the launcher has ended; the agents themselves a moment later."""
    assert not outcome.at_end, f"when the launcher ended there were {outcome.at_end}\n{outcome}"
    for name, when in outcome.gone.items():
        alone = name in outcome.cell.unreachable
        limit = AGENT_SECONDS if alone else outcome.seconds + LEAVING_SECONDS
        assert when is not None and when < limit, f"processes on {name}\n{outcome}"
    assert not outcome.folders, f"private folders are left: {outcome.folders}"


def _went_on(outcome: Outcome) -> None:
    """As if nothing had been: it was cut off long enough to matter, and the job ended well."""
    assert outcome.cut_seconds > 3.0, outcome  # one of up to 5 s must be survived, a longer one may
    assert all("closing" in outcome.log_lines[name] for name in WORKERS), outcome


def _blames_no_program(outcome: Outcome) -> None:
    everything = "\n".join([outcome.words, *outcome.log_lines.values()])
    assert "has finished already" not in everything and "DMLTRAIN_WAIT_TIMEOUT" not in everything, outcome


def _agents_ended_it(outcome: Outcome) -> None:
    """Where agents had a job, each has written what the launcher could not."""
    had_one = HOSTS if outcome.cell.phase != "before" else HOSTS[:2]
    for name in had_one:
        assert "ended the job" in outcome.agents.get(name, ""), outcome
        assert outcome.agents[name].splitlines()[-1] == "0 processes left on 1 host"


ALSO: dict[str, Callable[[Outcome], None]] = {
    "healing link": _went_on,
    **dict.fromkeys(CUTS, _blames_no_program),
    "launcher killed": _agents_ended_it,
    "launcher cut off": _agents_ended_it,
}
