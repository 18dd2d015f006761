"""dist_local in jobs: workers step alone and average their weights, with an outer optimizer; their states between and
after averages, and workers that do not do the same."""

import copy
import logging
import math

import numpy as np
import pytest
import torch
from torch import nn

from dmltrain.backends.torch import state as torch_state
from dmltrain.backends.torch.trainer import TorchTrainer
from dmltrain.base.errors import Diverged, UserError
from dmltrain.data.assignment.parts import Shared
from dmltrain.kvstore import agreement
from dmltrain.kvstore.local_steps import LocalSteps
from dmltrain.options import parse
from dmltrain.train import divergence
from dmltrain.train.plan import Plan
from dmltrain.train.resume import check_all_save
from dmltrain.train.run import Run
from dmltrain.train.steps import plain_rounds
from tests.backends import stepping_alone
from tests.backends.stepping_alone import MEAN, NESTEROV, Line, batches, joined, slopes, step, trained, weights
from tests.backends.trainers import SMALL, batch, torch_trainer
from tests.connected import connected
from tests.kvstore.whole_job import WholeJob

# -- what an average is ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outer", [MEAN, NESTEROV, (0.3, 0.5)], ids=str)
def test_outer_steps_are_those_of_the_paper(alone, outer):
    """Three averages of two steps each, of Line's gradients, in numpy: DiLoCo's algorithm 1."""
    rate, momentum = outer

    def one(store):
        model = Line()
        made = joined(store, model, LocalSteps(2, *outer), lr=0.5)
        for _ in range(6):
            step(made, model, slopes(store))
        return weights(model)

    expected, velocity = np.arange(4.0), np.zeros(4)
    for _ in range(3):
        gradient = 2 * 0.5 * 2 * np.arange(1.0, 5.0)  # two steps of 0.5, and workers' slopes of 1 and 3
        velocity = momentum * velocity + gradient
        expected = expected - rate * (gradient + momentum * velocity)
    first, second = alone.all(one)
    assert first == second and first == pytest.approx(expected.tolist(), rel=1e-6)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad])
def test_workers_differ_between_averages_and_are_equal_after_them(alone, kind):
    """Bit for bit, with weights of two buckets' types, and with any optimizer; so are the outer optimizer's arrays,
    and the inner ones are the workers' own."""

    def one(store):
        momentum = {"momentum": 0.9} if kind is torch.optim.SGD else {}
        model, made = trained(store, kind, LocalSteps(3, *NESTEROV), 4, **momentum)
        between = weights(model)
        made.synchronize()
        inner = [each.tolist() for state in made.state.values() for each in state.values() if each.dim()]
        common = {name: view.tolist() for found in made.common_state.values() for name, view in found.items()}
        return between, weights(model), common, inner

    (between, after, common, inner), other = alone.all(one)
    assert between != other[0] and after == other[1]
    assert common == other[2] != {} and inner != other[3]


def test_a_closure_is_evaluated_with_the_workers_own_gradients(alone):
    """L-BFGS needs one; it steps to the minimum of its own worker, and the average is between both."""

    def one(store):
        model = Line(2)
        target = torch.tensor([1.0, 3.0]) * (1 + store.rank)
        made = connected(model, torch.optim.LBFGS(model.parameters()), store, averaging=LocalSteps(5, *MEAN))

        def closure():
            made.zero_grad()
            loss = (model.weight - target).square().sum()
            loss.backward()
            return loss

        made.step(closure)
        own = weights(model)
        made.synchronize()
        return own, weights(model)

    for rank, (own, mean) in enumerate(alone.all(one)):
        assert own == pytest.approx([1.0 + rank, 3.0 * (1 + rank)], rel=1e-4)
        assert mean == pytest.approx([1.5, 4.5], rel=1e-4)


# -- when workers meet -----------------------------------------------------------------------------------------------


def test_workers_may_make_unequal_numbers_of_steps_until_they_synchronize(alone):
    """Worker 0 makes 7 steps and worker 1 makes 3, with averages after 2: worker 1 waits in `synchronize`, with its
    weights as they are, for the averages of worker 0."""

    def one(store):
        model = Line(1)
        made = joined(store, model, LocalSteps(2, *MEAN))
        for _ in range(7 - 4 * store.rank):
            step(made, model, torch.ones(1))
        made.synchronize()
        again = weights(model)
        made.synchronize()  # nothing has changed since
        assert weights(model) == again
        return again

    # Averages of: 2 and 2 steps; 2 and 1; 2 and 0; 1 and 0.
    assert alone.all(one) == [[-(2 + 1.5 + 1 + 0.5)]] * 2


def test_gradients_are_the_workers_own_and_may_be_accumulated_and_clipped(alone):
    def one(store):
        model = Line(4)
        made = joined(store, model, LocalSteps(1, *MEAN))
        with made.accumulate():
            model(slopes(store)).backward()
        model(slopes(store)).backward()
        made.reduce_gradients()
        assert model.weight.grad.tolist() == (2 * slopes(store)).tolist()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        made.step()
        return weights(model)

    unit = np.arange(1.0, 5.0) / math.sqrt(30)  # both workers' gradients are clipped to it
    for found in alone.all(one):
        assert found == pytest.approx((np.arange(4.0) - unit).tolist(), rel=1e-5)


def test_weights_that_are_loaded_between_averages_are_where_the_next_steps_begin(alone):
    def one(store):
        model = Line(2)
        made = joined(store, model, LocalSteps(1, 0.5, 0.0))
        step(made, model, torch.ones(2))
        model.load_state_dict({"weight": torch.tensor([10.0, 20.0])})
        step(made, model, torch.ones(2))
        return weights(model)

    assert alone.all(one) == [[9.5, 19.5]] * 2


# -- what travels ----------------------------------------------------------------------------------------------------


def counted(store):
    """Bytes sent so far. A link counts a frame after it has sent it, so the answer may be there before; another frame
    is sent after the count."""
    store.all_reduce("all frames before", np.zeros(1))
    return store.bytes_sent


def sent(job, averaging, steps, size=20_000):
    """Bytes that worker 0 sends for so many steps of Line."""

    def one(store):
        model = Line(size)
        made = joined(store, model, averaging, lr=0.1)
        before = counted(store)
        for _ in range(steps):
            step(made, model, slopes(store, size))
        return counted(store) - before

    return job.all(one)[0]


def test_a_worker_sends_a_gradient_for_all_its_local_steps(job, alone):
    each_step, seldom = sent(job, None, 50), sent(alone, LocalSteps(50, *MEAN), 50)
    assert each_step > 50 * 4 * 20_000
    assert seldom == pytest.approx(each_step / 50, rel=0.02)


@pytest.mark.parametrize("far", [0, 1])
def test_what_int8_leaves_out_of_an_outer_gradient_is_in_the_next_one(far):
    """Each average misses up to a quantum of the largest slope; 20 of them together miss no more than a few."""
    size, rounds = 256, 20

    def one(store):
        store.set_gradient_compression({"type": "int8"})
        model = Line(size)
        made = joined(store, model, LocalSteps(1, *MEAN))
        first = np.array(weights(model))
        for _ in range(rounds):
            step(made, model, torch.linspace(-1.0, 1.0, size) * (1 + 2 * store.rank))
        return first - np.array(weights(model)), store.residuals()

    job = WholeJob("dist_local", workers=2, servers=1, far=far)  # compression counts for all its later keys
    (found, residuals), (other, _) = job.all(one)
    job.close()
    assert np.array_equal(found, other) and any(residual.any() for residual in residuals.values())
    expected, quantum = rounds * 2.0 * np.linspace(-1.0, 1.0, size), 3.0 / 127
    error = np.abs(found - expected).max()
    assert 0 < error < 3 * quantum < rounds * quantum / 4


# -- states and mistakes -----------------------------------------------------------------------------------------------


def test_a_script_continues_from_each_workers_own_state_also_between_averages(alone):
    """Five steps and their state, and then four more: with an average after the sixth and the ninth."""

    def one(store):
        model, made = trained(store, torch.optim.SGD, LocalSteps(3, *NESTEROV), 5, momentum=0.9)
        saved, state = copy.deepcopy((model.state_dict(), made.state_dict()))
        assert state["outer"]["steps"] == 2 and len(state["outer"]["start"]) == len(state["outer"]["momentum"]) == 4
        fresh, again = trained(store, torch.optim.SGD, LocalSteps(3, *NESTEROV), 1, momentum=0.9)
        again.synchronize()
        fresh.load_state_dict(saved)
        again.load_state_dict(state)
        found = []
        for network, optimizer in ((model, made), (fresh, again)):
            stepping_alone.train(network, optimizer, batches(10 + store.rank, 4))
            found.append(weights(network))
        return found

    (whole, resumed), (other, _) = alone.all(one)
    assert whole == resumed == other


def test_a_state_of_dist_sync_is_continued_with_an_outer_momentum_of_zero(job, alone):
    (state, _) = job.all(lambda store: trained(store, torch.optim.SGD, None, 2, momentum=0.9)[1].state_dict())

    def one(store):
        _, made = trained(store, torch.optim.SGD, LocalSteps(1, *NESTEROV), 2, momentum=0.9)
        made.load_state_dict(state)
        arrays = [view for found in made.common_state.values() for view in found.values()]
        momentum = [each["momentum_buffer"].tolist() for each in made.state_dict()["state"].values()]
        return all(not view.any() for view in arrays) and len(arrays) == 4, momentum

    expected = [each["momentum_buffer"].tolist() for each in state["state"].values()]
    assert alone.all(one) == [(True, expected)] * 2


def test_a_state_has_the_arrays_of_all_buckets(alone):
    """Weights of two types are in two."""

    def one(store):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.float64))
        made = joined(store, model, LocalSteps(2, *NESTEROV))
        model[0](torch.ones(1, 2)).sum().backward()
        made.step()
        outer = made.state_dict()["outer"]
        return sorted(outer["start"]), sorted(outer["momentum"])

    assert alone.all(one) == [([0, 1, 2, 3], [0, 1, 2, 3])] * 2


def test_a_state_of_another_model_is_refused(alone):
    def one(store):
        _, made = trained(store, torch.optim.SGD, LocalSteps(1, *NESTEROV), 1)
        state = made.state_dict()
        state["outer"]["momentum"][1] = torch.zeros(9)
        with pytest.raises(UserError, match=r"parameter 1 .*\(9,\) .*\(8,\)"):
            made.load_state_dict(state)
        with pytest.raises(UserError, match="saved with the optimizer on the servers"):
            made.load_state_dict({**state, "servers": []})

    alone.all(one)


def test_what_does_not_fit_is_refused(alone):
    """Also where the workers' settings differ."""

    def one(store):
        model = Line()
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        with pytest.raises(UserError, match="factors .*dist_local"):
            connected(model, inner, store, factors=8)
        with pytest.raises(UserError, match="before dmltrain.distribute"):
            connected(model, inner, store).add_param_group({"params": []})
        with pytest.raises(UserError, match="4, 1 and 0 on worker 0 but 4, 0.5 and 0 on worker 1"):
            connected(model, inner, store, averaging=LocalSteps(4, 1.0 if store.rank == 0 else 0.5, 0.0))

    alone.all(one)


def test_a_state_between_averages_that_has_more_steps_than_are_now_wanted_is_averaged_next(alone):
    def one(store):
        _, made = trained(store, torch.optim.SGD, LocalSteps(9, *MEAN), 8)
        state = made.state_dict()
        model, again = trained(store, torch.optim.SGD, LocalSteps(3, *MEAN), 3)
        again.load_state_dict(state)
        stepping_alone.train(model, again, batches(store.rank, 1))
        return weights(model)

    first, second = alone.all(one)
    assert first == second


def test_a_parameter_that_was_frozen_when_the_state_was_saved_keeps_its_value(alone):
    def one(store):
        model = nn.Linear(2, 1)
        model.bias.requires_grad_(False)
        made = joined(store, model, LocalSteps(2, 0.5, 0.0), lr=0.0)
        model(torch.ones(1, 2)).sum().backward()
        made.step()
        fresh = nn.Linear(2, 1)
        again = joined(store, fresh, LocalSteps(2, 0.5, 0.0), lr=0.0)
        fresh.load_state_dict(model.state_dict())
        again.load_state_dict(made.state_dict())
        before = fresh.bias.item()
        fresh(torch.ones(1, 2)).sum().backward()
        again.step()
        return before, fresh.bias.item()

    for before, after in alone.all(one):
        assert before == after != 0.0


def test_workers_that_average_different_models_are_told(alone):
    """Worker 0 has made its last step and waits in the first model; worker 1 is still at the second."""

    def one(store):
        models = [Line(), Line()]
        made = [joined(store, model, LocalSteps(2, *MEAN)) for model in models]
        for model, optimizer in zip(models, made, strict=True):
            step(optimizer, model, torch.ones(4))
        with pytest.raises(UserError, match="average different models"):
            if store.rank == 0:
                made[0].synchronize()
            step(made[1], models[1], torch.ones(4))
        return True

    assert alone.all(one) == [True, True]


# -- training programs ------------------------------------------------------------------------------------------------


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
        common = {common_array.name: common_array for common_array in made.common_arrays()}
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
        run = Run(run.options, store, None, SMALL, None, None, None, parts, Plan(1, 1, 1))
        return plain_rounds(run, 0, 0, 1).begin()[1]

    assert alone.all(one) == [parts.step_sizes(0)[0], parts.step_sizes(0)[1]]


def test_only_some_workers_that_save_are_refused(alone):
    def one(store):
        words = ["--model-prefix", "m"] if store.rank == 0 else []
        options = parse([*LINE.split(), *words])
        with pytest.raises(UserError, match="1 of 2 workers.*dist_local"):
            check_all_save(options, store)

    alone.all(one)
