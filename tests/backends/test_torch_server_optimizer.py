"""A server's step of one slice, and the spec that a worker makes of its optimizer. That a server's steps are the
workers' is in test_optimizers_on_servers.py."""

import json

import numpy as np
import pytest
import torch

from dmltrain.backends.torch.optimizer import BY_CLASS, class_of
from dmltrain.backends.torch.server_optimizer import Step, make_spec
from dmltrain.errors import UserError


def stepped(spec, *gradients, key=0, rate=-1.0, value=1.0):
    values = np.full(3, value, np.float32)
    step = Step(spec, key, values)
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


def test_a_learning_rate_holds_until_the_next_one():
    values = np.ones(3, np.float32)
    step = Step({"name": "sgd"}, 0, values)
    for rate in (0.25, -1.0):
        step(values, np.ones(3, np.float32), rate)
    assert values.tolist() == [0.5] * 3
    assert step.state() == {}, "a plain optimizer has none"


def test_options_of_a_key_override_those_of_all_keys():
    spec = {"name": "sgd", "lr": 0.5, "keys": {"7": {"lr": 0.25}, "8": {}}}
    assert [stepped(spec, 1.0, key=key)[0] for key in (7, 8, 9)] == [0.75, 0.5, 0.5]


@pytest.mark.parametrize("name", [*BY_CLASS, "AdamW"])
def test_options_that_a_spec_leaves_out_are_torchs(name):
    values, own = np.full(3, 2.0, np.float32), torch.full((3,), 2.0, requires_grad=True)
    step, torchs = Step({"name": name, "lr": 0.1}, 0, values), class_of(name.lower())([own], lr=0.1)
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
    step = Step({"name": "sgd", "lr": 1.0, "momentum": 0.5}, 0, first)
    step(first, np.ones(3, np.float32), -1.0)
    step(second, np.ones(3, np.float32), -1.0)
    assert first.tolist() == [0.0] * 3 and second.tolist() == [3.5] * 3


@pytest.mark.parametrize("name", BY_CLASS)
def test_a_state_that_is_loaded_continues_bit_for_bit(name):
    numbers = {"momentum": 0.9} if "momentum" in BY_CLASS[name].options else {}
    whole, values = np.ones(3, np.float32), np.ones(3, np.float32)
    first, second = (Step({"name": name, "lr": 0.1, **numbers}, 0, each) for each in (whole, values))
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
        Step(spec, 0, np.ones(3, np.float32))


def test_lists_of_numbers_are_accepted():
    """Betas come as a list through JSON."""
    usual = {"name": "adam", "lr": 0.1}
    assert stepped({**usual, "betas": [0.5, 0.5]}, 1.0, -1.0) != stepped(usual, 1.0, -1.0)


def test_a_spec_is_json_and_makes_the_same_steps_as_its_optimizer():
    weight = torch.nn.Parameter(torch.ones(3))
    inner = torch.optim.SGD([weight], lr=0.5, momentum=0.9, weight_decay=0.1)
    spec = make_spec(inner, {4: inner.param_groups[0]}, 0.5)
    assert spec["name"] == "sgd" and spec["rescale"] == 0.5
    assert "rate_in_momentum" not in spec["keys"]["4"], "scripts have torch's momentum"
    assert json.loads(json.dumps(spec)) == spec and "params" not in spec["keys"]["4"]
    values = np.ones(3, np.float32)
    step = Step(spec, 4, values)
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
    Step(sent, 0, np.ones(3, np.float32))


@pytest.mark.parametrize("name", [name for name, row in BY_CLASS.items() if "cpu" in row.fused])
def test_a_step_is_one_pass_over_memory(name):
    values = np.ones(3, np.float32)
    step = Step({"name": name, "lr": 0.1}, 0, values)
    with torch.profiler.profile() as profile:
        step(values, np.ones(3, np.float32), -1.0)
    assert f"aten::_fused_{name}_" in {event.name for event in profile.events()}


# -- momentum that contains the learning rate -------------------------------------------------------------------------

FOLLOWING = {"name": "sgd", "lr": 0.1, "momentum": 0.5, "rate_in_momentum": True}


def moved(steps, step=None, value=1.0):
    """The values after each of these (rate, gradient)."""
    values, found = np.full(2, value, np.float32), []
    step = step or Step(FOLLOWING, 0, values)
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


def test_the_momentums_rate_is_in_the_state():
    """So that it follows a change of the rate at a resume."""
    (_, whole), (_, first) = (moved([(0.1, 1.0), (0.2, 2.0)]) for _ in range(2))
    again = Step(FOLLOWING, 0, np.ones(2, np.float32))
    again.load({name: np.array(array) for name, array in first.state().items()})
    assert first.state()["lr"] == 0.2
    assert moved([(0.02, 1.0)], again)[0] == moved([(0.02, 1.0)], whole)[0]


def test_a_state_of_04_has_no_rate_and_its_momentum_stays_as_it_is():
    step = Step(FOLLOWING, 0, np.ones(2, np.float32))
    step.load({"momentum_buffer": np.full(2, 4.0, np.float32)})
    assert moved([(0.5, 0.0), (0.25, 0.0)], step)[0] == [0.0, -0.5]  # 1 - 0.5 * 2, and half as far again
