"""The optimizer on the servers makes the same steps as in a plain loop."""

import json

import numpy as np
import pytest
import torch
from torch import nn

from dmltrain.backends.torch.optimizer import BY_CLASS, class_of, set_rate
from dmltrain.backends.torch.server_optimizer import SliceOptimizer, make_spec
from dmltrain.base.errors import UserError
from tests.backends.served_store import ServedStore
from tests.connected import connected

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-2, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.8, 0.9)),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
}


def model_of():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))


def backward(model, optimizer, step):
    images = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad()
    model(images).pow(2).mean().backward()


def weights(model):
    return torch.cat([parameter.detach().reshape(-1).clone() for parameter in model.parameters()])


def train(model, optimizer, steps=3, rate=0.05):
    for step in range(steps):
        set_rate(optimizer, rate / (step + 1))
        backward(model, optimizer, step)
        optimizer.step()
    return weights(model)


def on_servers(kind="sgd", store=None, **options):
    """A model, and its optimizer on the servers of this store."""
    model, store = model_of(), store or ServedStore()
    on = {"update_on_kvstore": True} if store.type == "dist_sync" else {}
    return model, connected(model, OPTIMIZERS[kind](model.parameters()), store, **on, **options)


def plainly(kind, factors):
    """Each step with the plain gradient times these, one after the other."""
    model = model_of()
    optimizer = OPTIMIZERS[kind](model.parameters())
    for step in range(3):
        set_rate(optimizer, 0.05 / (step + 1))
        backward(model, optimizer, step)
        gradients = [parameter.grad.clone() for parameter in model.parameters()]
        for factor in factors:
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient * factor
            optimizer.step()
    return weights(model)


WAYS = [{}, {"step_early": True}, {"defer": True}]


@pytest.mark.parametrize("way", WAYS, ids="-".join)
@pytest.mark.parametrize("average, factor", [(True, 1.5), (False, 3.0)])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_synchronous_steps_are_of_the_mean_or_the_sum(kind, average, factor, way):
    """The workers' gradients are 1 and 2 times the same."""
    model, optimizer = on_servers(kind, average=average, **way)
    train(model, optimizer)
    optimizer.synchronize()
    torch.testing.assert_close(weights(model), plainly(kind, [factor]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", WAYS, ids="-".join)
@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("store", ["dist_async", "dist_ssp"])
def test_asynchronous_steps_use_the_whole_gradient(store, average, way):
    model, optimizer = on_servers(store=ServedStore(store), average=average, **way)
    train(model, optimizer)
    optimizer.synchronize()
    torch.testing.assert_close(weights(model), plainly("sgd", [1.0, 2.0]), rtol=1e-5, atol=1e-6)


def test_groups_keep_their_own_options_and_rates():
    plain, model, store = model_of(), model_of(), ServedStore()

    def two_groups(of):
        first = {"params": of[0].parameters(), "lr": 0.1, "momentum": 0.9}
        return torch.optim.SGD([first, {"params": of[2].parameters(), "lr": 0.01, "weight_decay": 0.5}], lr=9.0)

    inner, optimizer = two_groups(plain), two_groups(model)
    optimizer = connected(model, optimizer, store, average=False, update_on_kvstore=True)
    for step in range(3):
        backward(plain, inner, step)
        for parameter in plain.parameters():
            parameter.grad *= 3
        inner.step()
        backward(model, optimizer, step)
        optimizer.step()
    optimizer.synchronize()
    torch.testing.assert_close(weights(model), weights(plain), rtol=1e-5, atol=1e-6)
    assert sorted(set(store.rates)) == [0.01, 0.1]


@pytest.mark.parametrize("change", [{"momentum": 0.5}, {"weight_decay": 0.1}, {"nesterov": False}])
def test_changes_that_servers_would_not_notice_are_refused(change):
    model, optimizer = on_servers()
    train(model, optimizer, 1)  # with another learning rate, which is allowed
    optimizer.param_groups[0].update(change)
    backward(model, optimizer, 1)
    with pytest.raises(UserError, match="only the learning rate"):
        optimizer.step()


def test_gradients_cannot_be_reduced_where_servers_step():
    with pytest.raises(UserError, match="no worker has the mean"):
        on_servers()[1].reduce_gradients()


def test_a_state_of_an_optimizer_on_the_workers_is_refused():
    state = OPTIMIZERS["sgd"](model_of().parameters()).state_dict()
    with pytest.raises(UserError, match="on the workers.*dist_async"):
        on_servers(store=ServedStore("dist_async"))[1].load_state_dict(state)


@pytest.mark.parametrize(
    "options, during", [({}, False), (WAYS[1], True), ({"overlap": False, **WAYS[1]}, False)], ids=str
)
def test_gradients_are_sent_with_the_step_or_during_backward(options, during):
    store = ServedStore()
    model, optimizer = on_servers(store=store, **options)
    backward(model, optimizer, 0)
    assert (len(store.rates) > 0) == during
    optimizer.step()
    assert len(store.rates) > 0


def test_a_new_rate_waits_for_no_weights():
    """The servers have the momentum that follows it."""
    model = model_of()
    inner = torch.optim.SGD([{"params": model.parameters(), "rate_in_momentum": True}], lr=0.1, momentum=0.9)
    optimizer = connected(model, inner, ServedStore(), update_on_kvstore=True, defer=True)
    train(model, optimizer, 1)
    set_rate(optimizer, 0.5)
    assert optimizer._exchange.gradients.pending and optimizer.param_groups[0]["lr"] == 0.5
    optimizer.settle()
    assert not optimizer._exchange.gradients.pending


# -- a server's step of one slice, and the spec that a worker makes of its optimizer ----------------------------------


def stepped(spec, *gradients, key=0, rate=-1.0, value=1.0):
    values = np.full(3, value, np.float32)
    step = SliceOptimizer(spec, key, values)
    for gradient in gradients:
        step(values, np.full(3, gradient, np.float32), rate)
    return values.tolist()


@pytest.mark.parametrize(
    "spec, rate, expected",
    [
        ({"lr": 0.5}, -1.0, 0.5),  # a negative rate means none: that of the spec counts
        ({"lr": 0.5, "name": "SGD"}, -1.0, 0.5),  # as torch writes it
        ({"lr": 0.5}, 0.0, 1.0),
        ({"lr": 0.5}, 0.25, 0.75),
        ({}, -1.0, 1.0),  # without a learning rate nothing changes
        ({"lr": 0.5, "rescale": 1.0}, -1.0, 0.5),
        ({"lr": 0.5, "rescale": 0.5}, -1.0, 0.75),
        ({"lr": 0.5, "rescale": 2}, -1.0, 0.0),
    ],
)
def test_a_step_has_the_rate_of_its_push_or_of_its_spec_and_rescales_each_gradient(spec, rate, expected):
    assert stepped({"name": "sgd", **spec}, 1.0, rate=rate) == [expected] * 3


def test_a_learning_rate_holds_until_the_next_one_and_options_of_a_key_override_those_of_all_keys():
    values = np.ones(3, np.float32)
    step = SliceOptimizer({"name": "sgd"}, 0, values)
    for rate in (0.25, -1.0):
        step(values, np.ones(3, np.float32), rate)
    assert values.tolist() == [0.5] * 3
    assert step.state() == {}, "a plain optimizer has none"
    spec = {"name": "sgd", "lr": 0.5, "keys": {"7": {"lr": 0.25}, "8": {}}}
    assert [stepped(spec, 1.0, key=key)[0] for key in (7, 8, 9)] == [0.75, 0.5, 0.5]


@pytest.mark.parametrize("name", [*BY_CLASS, "AdamW"])
def test_options_that_a_spec_leaves_out_are_torchs(name):
    values, own = np.full(3, 2.0, np.float32), torch.full((3,), 2.0, requires_grad=True)
    step, torchs = SliceOptimizer({"name": name, "lr": 0.1}, 0, values), class_of(name.lower())([own], lr=0.1)
    if BY_CLASS[name.lower()].numbered:
        torchs.state[own]["number"] = 0
    for number in (1.0, -3.0, 0.5):
        step(values, np.full(3, number, np.float32), -1.0)
        own.grad = torch.full((3,), number)
        torchs.step()
    np.testing.assert_allclose(values, own.detach().numpy(), rtol=1e-6)


def test_a_step_writes_to_the_given_destination():
    """While a value is being read, a step writes to other memory."""
    first, second = np.ones(3, np.float32), np.full(3, 5.0, np.float32)
    step = SliceOptimizer({"name": "sgd", "lr": 1.0, "momentum": 0.5}, 0, first)
    step(first, np.ones(3, np.float32), -1.0)
    step(second, np.ones(3, np.float32), -1.0)
    assert first.tolist() == [0.0] * 3 and second.tolist() == [3.5] * 3


@pytest.mark.parametrize("name", BY_CLASS)
def test_a_state_that_is_loaded_continues_bit_for_bit(name):
    numbers = {"momentum": 0.9} if "momentum" in BY_CLASS[name].options else {}
    whole, values = np.ones(3, np.float32), np.ones(3, np.float32)
    first, second = (SliceOptimizer({"name": name, "lr": 0.1, **numbers}, 0, each) for each in (whole, values))
    for gradient in (1.0, 2.0):
        first(whole, np.full(3, gradient, np.float32), -1.0)
    saved = {key: np.array(array) for key, array in first.state().items()}
    assert saved
    values[:] = whole
    second.load(saved)
    for step, each in ((first, whole), (second, values)):
        step(each, np.full(3, -1.5, np.float32), -1.0)
    assert whole.tobytes() == values.tobytes()


@pytest.mark.parametrize(
    "spec, message",
    [
        ({"name": "sgdm"}, f"'sgdm'.*{', '.join(BY_CLASS)}"),
        ({}, "unknown optimizer ''"),
        ({"name": "sgd", "beta": 1}, "lr, momentum, .*'beta'"),
        ({"name": "sgd", "lr": "fast"}, "lr='fast'"),
        ({"name": "sgd", "rescale": None}, "rescale=None"),
        ({"name": "sgd", "lr": float("nan")}, "lr=nan"),
        ({"name": "sgd", "momentum": 10**400}, "momentum=10+"),
        ({"name": "adam", "betas": [0.9, float("inf")]}, "betas=inf"),
        ({"name": "adam", "betas": [0.9, "x"]}, "betas='x'"),
    ],
)
def test_an_invalid_spec_is_refused_with_its_name(spec, message):
    with pytest.raises(ValueError, match=message):
        SliceOptimizer(spec, 0, np.ones(3, np.float32))


def test_lists_of_numbers_are_accepted():
    """Betas come as a list through JSON."""
    usual = {"name": "adam", "lr": 0.1}
    assert stepped({**usual, "betas": [0.5, 0.5]}, 1.0, -1.0) != stepped(usual, 1.0, -1.0)


def test_a_spec_is_json_and_makes_the_same_steps_as_its_optimizer():
    weight = torch.nn.Parameter(torch.ones(3))
    inner = torch.optim.SGD([weight], lr=torch.tensor(0.5), momentum=0.9, weight_decay=0.1)  # torch also takes tensors
    spec = make_spec(inner, {4: inner.param_groups[0]}, 0.5)
    assert spec["name"] == "sgd" and spec["rescale"] == 0.5
    assert "rate_in_momentum" not in spec["keys"]["4"], "scripts have torch's momentum"
    assert json.loads(json.dumps(spec)) == spec and "params" not in spec["keys"]["4"]
    values = np.ones(3, np.float32)
    step = SliceOptimizer(spec, 4, values)
    for gradient in (1.0, 2.0):
        weight.grad = torch.full((3,), gradient * 0.5)
        inner.step()
        step(values, np.full(3, gradient, np.float32), -1.0)
    np.testing.assert_allclose(values, weight.detach().numpy(), rtol=1e-6)


class SGD(torch.optim.SGD):
    """A program's own class of a name that servers have."""


@pytest.mark.parametrize("kind", [torch.optim.RAdam, SGD])
def test_an_optimizer_that_servers_lack_is_named(kind):
    with pytest.raises(UserError, match=f"{kind.__name__} cannot run.* sgd, .*dist_sync"):
        make_spec(kind([torch.nn.Parameter(torch.ones(3))], lr=0.1), {}, 1.0)


LEFT_TO_SERVERS = {"foreach", "capturable", "differentiable", "fused"}  # how, not what


@pytest.mark.parametrize("name", BY_CLASS)
def test_every_number_of_an_optimizer_reaches_the_servers(name):
    inner = class_of(name)([torch.nn.Parameter(torch.ones(3))])
    sent = make_spec(inner, {0: inner.param_groups[0]}, 1.0)
    always = {"decoupled_weight_decay"} if name == "adamw" else set()  # no option of the class
    assert set(sent["keys"]["0"]) == inner.defaults.keys() - LEFT_TO_SERVERS - always
    SliceOptimizer(sent, 0, np.ones(3, np.float32))


@pytest.mark.parametrize("name", [name for name, row in BY_CLASS.items() if "cpu" in row.fused])
def test_a_step_is_one_pass_over_memory(name):
    values = np.ones(3, np.float32)
    step = SliceOptimizer({"name": name, "lr": 0.1}, 0, values)
    with torch.profiler.profile() as profile:
        step(values, np.ones(3, np.float32), -1.0)
    assert f"aten::_fused_{name}_" in {event.name for event in profile.events()}


# -- momentum that contains the learning rate -------------------------------------------------------------------------

FOLLOWING = {"name": "sgd", "lr": 0.1, "momentum": 0.5, "rate_in_momentum": True}


def moved(steps, step=None, value=1.0):
    """The values after each of these (rate, gradient)."""
    values, found = np.full(2, value, np.float32), []
    step = step or SliceOptimizer(FOLLOWING, 0, values)
    for rate, gradient in steps:
        step(values, np.full(2, gradient, np.float32), rate)
        found.append(float(values[0]))
    return found, step


def test_earlier_gradients_keep_their_rate():
    """As in MXNet: m = momentum * m - rate * gradient, weight += m. A rate of 0 stops, and forgets."""
    weight = momentum = 1.0
    momentum, expected = 0.0, []
    for rate, gradient in ((0.1, 1.0), (0.4, 2.0), (0.05, -1.0)):
        momentum = 0.5 * momentum - rate * gradient
        weight += momentum
        expected.append(weight)
    found, step = moved([(0.1, 1.0), (0.4, 2.0), (0.05, -1.0)])
    assert found == pytest.approx(expected, rel=1e-6)
    found, _ = moved([(0.0, 1.0), (0.5, 1.0)], step)
    assert found == pytest.approx([1.0, 0.5])


def test_the_momentums_rate_is_in_the_state_and_without_one_as_in_04_the_momentum_stays_as_it_is():
    """So that it follows a change of the rate at a resume."""
    (_, whole), (_, first) = (moved([(0.1, 1.0), (0.2, 2.0)]) for _ in range(2))
    again = SliceOptimizer(FOLLOWING, 0, np.ones(2, np.float32))
    again.load({name: np.array(array) for name, array in first.state().items()})
    assert first.state()["lr"] == 0.2
    assert moved([(0.02, 1.0)], again)[0] == moved([(0.02, 1.0)], whole)[0]
    step = SliceOptimizer(FOLLOWING, 0, np.ones(2, np.float32))
    step.load({"momentum_buffer": np.full(2, 4.0, np.float32)})
    assert moved([(0.5, 0.0), (0.25, 0.0)], step)[0] == [0.0, -0.5]  # 1 - 0.5 * 2, and half as far again
