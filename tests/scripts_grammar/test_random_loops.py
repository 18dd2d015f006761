"""Random training loops, as several workers and as one process; and what finds the faults among them."""

import numpy as np
import pytest

from dmltrain.base.errors import UserError
from tests.elastic_job import COMPILER
from tests.scripts_grammar import drawing, page
from tests.scripts_grammar.drawing import Piece, Program
from tests.scripts_grammar.judging import alone, judge, smallest, valid
from tests.scripts_grammar.run import Summary
from tests.tiers import seed_ranges

REFUSED = 0.05  # of the programs that DistributedDataParallel trains, at most
TRAINS = """model = made(Mlp, 1)
optimizer = distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
loss(model, 0).backward()
nn.utils.clip_grad_norm_(model.parameters(), 0.1)
optimizer.step()
note(model)
"""


def program(text: str) -> Program:
    lines = enumerate(text.splitlines())
    return Program(2, tuple(Piece((), line, number < 2) for number, line in lines))


def all_alone(model, optimizer, store):
    return alone(model, optimizer)


@pytest.mark.parametrize("seeds", seed_ranges(50, 200, 10000))
def test_workers_train_what_one_process_trains_or_refuse(seeds):
    summary = Summary(seeds)
    assert not summary.failures, "\n".join([summary.text(), *summary.listings()])
    assert summary.refused <= REFUSED, summary.text()


@pytest.mark.parametrize("seeds", seed_ranges(15, 60, 3000))
def test_members_of_an_elastic_job_train_what_one_process_trains_or_refuse(seeds):
    summary = Summary(seeds, elastic=True)
    assert not summary.failures, "\n".join([summary.text(), *summary.listings()])


@pytest.mark.parametrize(("transport", "first"), [("tcp", 0), pytest.param("shm", 10, marks=pytest.mark.thorough)])
def test_real_jobs_train_the_same(start_forked, transport, first):
    job = start_forked("in_job.py", first, first + 10, env={"DMLTRAIN_TRANSPORT": transport}, modules=(COMPILER,))
    job.succeed()
    for worker in range(2):
        (found,) = job.results(worker)
        assert found["done"] > 7 and not found["wrong"]


def test_workers_that_do_not_exchange_gradients_are_found_out_in_the_smallest_program():
    verdict = judge(program(TRAINS), all_alone)
    assert verdict.kind == "wrong" and "note 0" in verdict.text
    small = smallest(program(TRAINS), all_alone, verdict.cause)
    assert [piece.code for piece in small.pieces[2:]] == ["note(model)"], "they begin with other weights"


def test_errors_refusals_and_hangs_are_told_apart():
    def refuses(model, optimizer, store):
        raise UserError("no such thing")

    def fails(model, optimizer, store):
        raise KeyError("a")

    def waits_for_another(model, optimizer, store):
        store.all_reduce(f"of worker {store.rank}", np.zeros(1))
        return optimizer

    def waits_for_the_gone(model, optimizer, store):
        if store.rank == 0:
            store.barrier()
        return alone(model, optimizer)

    ways = (refuses, fails, waits_for_another, waits_for_the_gone)
    found = [judge(program(TRAINS.replace("note(model)", "")), way) for way in ways]
    assert [each.kind for each in found] == ["refused", "error", "hangs", "refused"]
    assert found[0].text == "no such thing" and "all_reduce of of worker" in found[2].text
    assert "worker 1 has finished already" in found[3].text


def test_programs_of_a_seed_are_the_same_and_use_most_idioms():
    assert valid(3)[0] == valid(3)[0] != valid(4)[0]
    used = set().union(*(drawing.program(seed).idioms for seed in range(100)))
    assert len(used) > 60


def test_the_page_of_the_documentation_is_up_to_date():
    assert page.PAGE.read_text() == page.page(), "write it anew: python -m tests.scripts_grammar.page"
