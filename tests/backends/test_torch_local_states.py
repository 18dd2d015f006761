"""dist_local in jobs: the states of optimizers between and after averages, and workers that do not do the same."""

import copy

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
from torch import nn  # noqa: E402

from dmltrain.backends.torch.distributed import distribute  # noqa: E402
from dmltrain.errors import UserError  # noqa: E402
from dmltrain.kvstore.local_steps import LocalSteps  # noqa: E402
from tests.backends.stepping_alone import MEAN, NESTEROV, Line, batches, step, trained, weights  # noqa: E402


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
            for x in batches(10 + store.rank, 4):
                optimizer.zero_grad()
                network(x).square().mean().backward()
                optimizer.step()
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


def test_a_state_of_another_model_is_refused(alone):
    def one(store):
        _, made = trained(store, torch.optim.SGD, LocalSteps(1, *NESTEROV), 1)
        state = made.state_dict()
        state["outer"]["momentum"][1] = torch.zeros(9)
        with pytest.raises(UserError, match=r"parameter 1 has the shape \(9,\) there and \(8,\) here"):
            made.load_state_dict(state)
        with pytest.raises(UserError, match="saved with the optimizer on the servers"):
            made.load_state_dict({**state, "servers": []})

    alone.all(one)


def test_what_does_not_fit_is_refused(alone):
    def one(store):
        model = Line()
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        with pytest.raises(
            UserError, match="factors stand for gradients, and kvstore dist_local sends none: use dist_"
        ):
            distribute(model, inner, store, factors=8)
        with pytest.raises(UserError, match="before dmltrain.distribute"):
            distribute(model, inner, store).add_param_group({"params": []})

    alone.all(one)


def test_a_state_between_averages_that_has_more_steps_than_are_now_wanted_is_averaged_next(alone):
    def one(store):
        _, made = trained(store, torch.optim.SGD, LocalSteps(9, *MEAN), 8)
        state = made.state_dict()
        model, again = trained(store, torch.optim.SGD, LocalSteps(3, *MEAN), 3)
        again.load_state_dict(state)
        for x in batches(store.rank, 1):
            again.zero_grad()
            model(x).square().mean().backward()
            again.step()
        return weights(model)

    first, second = alone.all(one)
    assert first == second


def test_a_parameter_that_was_frozen_when_the_state_was_saved_keeps_its_value(alone):
    def one(store):
        model = nn.Linear(2, 1)
        model.bias.requires_grad_(False)
        averaging = LocalSteps(2, 0.5, 0.0)
        made = distribute(model, torch.optim.SGD(model.parameters(), lr=0.0), store, averaging=averaging)
        model(torch.ones(1, 2)).sum().backward()
        made.step()
        fresh = nn.Linear(2, 1)
        again = distribute(fresh, torch.optim.SGD(fresh.parameters(), lr=0.0), store, averaging=averaging)
        fresh.load_state_dict(model.state_dict())
        again.load_state_dict(made.state_dict())
        before = fresh.bias.item()
        fresh(torch.ones(1, 2)).sum().backward()
        again.step()
        return before, fresh.bias.item()

    for before, after in alone.all(one):
        assert before == after != 0.0


# -- workers that do not do the same ----------------------------------------------------------------------------------


def test_workers_with_other_settings_are_told(alone):
    def one(store):
        model = Line()
        settings = LocalSteps(4, 1.0 if store.rank == 0 else 0.5, 0.0)
        with pytest.raises(UserError) as raised:
            distribute(model, torch.optim.SGD(model.parameters(), lr=1.0), store, averaging=settings)
        return str(raised.value)

    said = "local_steps, outer_lr and outer_momentum are 4, 1 and 0 on worker 0 but 4, 0.5 and 0 on worker 1"
    assert alone.all(one) == [f"{said}: give all workers the same"] * 2


def test_workers_that_average_different_models_are_told(alone):
    """Worker 0 has made its last step and waits in the first model; worker 1 is still at the second."""

    def one(store):
        models = [Line(), Line()]
        made = [
            distribute(model, torch.optim.SGD(model.parameters(), lr=1.0), store, averaging=LocalSteps(2, *MEAN))
            for model in models
        ]
        for model, optimizer in zip(models, made, strict=True):
            step(optimizer, model, torch.ones(4))
        with pytest.raises(UserError, match="the workers average different models: .* the same number of steps"):
            if store.rank == 0:
                made[0].synchronize()
            step(made[1], models[1], torch.ones(4))
        return True

    assert alone.all(one) == [True, True]
