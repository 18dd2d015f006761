"""The torch trainer with dist_local, in a job: what workers have in common, and what each has of its own."""

import logging

import pytest

from dmltrain import agreement, divergence
from dmltrain.backends.torch import state as torch_state
from dmltrain.backends.torch.trainer import TorchTrainer
from dmltrain.data.parts import Shared
from dmltrain.epochs import step_total
from dmltrain.errors import Diverged, UserError
from dmltrain.options import parse
from dmltrain.plan import Plan
from dmltrain.resume import check_all_save
from dmltrain.run import Run
from tests.backends.trainers import SMALL, batch, torch_trainer
from tests.kvstore.whole_job import WholeJob

LINE = "--kv-store dist_local --local-steps 2 --outer-lr 0.7 --outer-momentum 0.9"


def trainer(store, line="", state=None):
    return torch_trainer(SMALL, f"{LINE} {line}", store, state)


def steps(made, seeds, samples=4):
    for seed in seeds:
        made.train_step(*batch(SMALL, samples, seed), max(1, samples), 0.1)


def settled(made, store):
    made.synchronize()
    made.merge_statistics(store.all_reduce, store.num_workers)


def run_of(store, made):
    options, parts = parse(LINE.split()), Shared(1, 1, 1, samples=16)
    return Run(options, store, logging.Logger("test"), SMALL, None, made, None, parts, Plan(16))


def momentum(made):
    return [each["momentum_buffer"].tolist() for each in made._optimizer.state.values()]


def checked(run):
    try:
        divergence.check(run, 0)
    except Diverged as error:
        return str(error)


@pytest.mark.parametrize("line", ["", "--dtype float16", "--devices cpu:2"])
def test_weights_and_the_outer_momentum_are_compared_and_the_workers_momentum_is_not(alone, line):
    """Nor is the scale of the loss, which follows each worker's own gradients. Worker 1's last batch is empty."""

    def one(store):
        made = trainer(store, line)
        steps(made, [10 + store.rank, 20 + store.rank])
        steps(made, [30], samples=4 * (1 - store.rank))
        settled(made, store)
        run = run_of(store, made)
        assert checked(run) is None
        common = {each.name: each for each in made.common_arrays()}
        assert not [name for name in common if "momentum_buffer" in name or "scale" in name]
        faults = []
        for name in ("fc0_weight", "outer_momentum of parameter 0"):
            before = common[name].read().copy()
            common[name].write(before * (1 + store.rank))
            faults.append(checked(run))
            common[name].write(before)
        return momentum(made), faults

    (own, faults), (other, _) = alone.all(one)
    assert own != other
    for fault, name in zip(faults, ("fc0_weight", "outer_momentum of parameter 0"), strict=True):
        assert f"of the largest value in {name})" in fault and "worker 1" in fault


@pytest.mark.parametrize("line", ["", "--dtype float16", "--gc-type int8"])
def test_each_worker_continues_with_its_own_state(line):
    """With the servers and stores of another job."""

    def first(store):
        made = trainer(store, line)
        steps(made, [10 + store.rank, 20 + store.rank, 30 + store.rank])
        settled(made, store)
        residuals = store.residuals()
        others = [torch_state.decode(each) for each in agreement.gathered(store, torch_state.encode(made.own_state()))]
        state = made.state(residuals, others[1:]) if store.rank == 0 else None
        kept = state and torch_state.encode(state)
        steps(made, [40 + store.rank, 50 + store.rank, 60 + store.rank])
        settled(made, store)
        return kept, made.digest(), momentum(made)

    def second(store):
        made = trainer(store, line, torch_state.decode(kept))
        steps(made, [40 + store.rank, 50 + store.rank, 60 + store.rank])
        settled(made, store)
        return made.digest(), momentum(made)

    results = []
    for each in (first, second):
        made = WholeJob("dist_local", workers=2, servers=1)
        results.append(made.all(each))
        kept = results[0][0][0]
        made.all(lambda store: store.close())
        made.close()
    assert [found[1:] for found in results[0]] == results[1]
    assert results[1][0][0] == results[1][1][0] and results[1][0][1] != results[1][1][1]


@pytest.mark.parametrize("kind, kept", [("dist_sync", False), ("dist_local", True)])
def test_residuals_of_another_kvstore_are_left_out(kind, kept):
    """They are of gradients with dist_sync, and of differences of weights with dist_local."""
    saved = {}
    for each in (kind, "dist_local"):
        job = WholeJob(each, workers=1, servers=1)

        def one(store, each=each):
            words = [*(LINE if each == "dist_local" else f"--kv-store {each}").split(), "--gc-type", "topk"]
            state = torch_state.decode(saved["state"]) if saved else None
            made = TorchTrainer(SMALL, parse(words), store, state)
            before = store.residuals()["worker 0"]
            steps(made, [10, 20])
            settled(made, store)
            saved["state"] = torch_state.encode(made.state(store.residuals()))
            return before

        (found,) = job.all(one)
        job.all(lambda store: store.close())
        job.close()
    assert found.any() == kept


def test_a_worker_that_was_not_there_continues_with_worker_0s_state(alone):
    def one(store):
        made = trainer(store)
        steps(made, [10 + store.rank])
        settled(made, store)
        return made.state()  # as the only worker of a job would save it

    state, _ = alone.all(one)
    first, second = alone.all(lambda store: momentum(trainer(store, state=state)))
    assert first == second != []


def test_a_step_is_the_mean_over_the_workers_own_samples(alone):
    parts = Shared(24, 2, 16, samples=24)  # batches of 12

    def one(store):
        run = run_of(store, None)
        return step_total(Run(run.options, store, None, SMALL, None, None, None, parts, Plan(1)), 0)

    assert alone.all(one) == [parts.step_sizes(0)[0], parts.step_sizes(0)[1]]


def test_only_some_workers_that_save_are_refused(alone):
    def one(store):
        words = ["--model-prefix", "m"] if store.rank == 0 else []
        options = parse([*LINE.split(), *words])
        with pytest.raises(UserError, match="1 of 2 workers.*dist_local"):
            check_all_save(options, store)

    alone.all(one)
