"""MXNet's optimizers from specs: the state resumes bit-exactly, specs say all, and the rest is refused. What steps they
make is in test_optimizers.py, for all but options that no training program has."""

import numpy as np
import pytest

from dmltrain.backends.mxnet import compat as mxnet_compat
from dmltrain.backends.mxnet import optimizer as mxnet_optimizer
from dmltrain.backends.mxnet.optimizer import Updater, make, spec_of
from dmltrain.errors import UserError

mx = mxnet_compat.load()

EXTRA = {"sgd": {"momentum": 0.9}, "nag": {"momentum": 0.9}, "rmsprop": {"centered": True}}


def spec(name: str, **more) -> dict:
    return {"name": name, "lr": 0.1, "wd": 0.01, **EXTRA.get(name, {}), **more}


def gradients(count: int = 6, seed: int = 0) -> list[np.ndarray]:
    return list(np.random.default_rng(seed).standard_normal((count, 7), dtype=np.float32))


def stepped(updater, weight=None, steps=None, key: int = 3):
    """`weight` after these steps; it changes in place."""
    weight = mx.nd.array(np.linspace(-1, 1, 7)) if weight is None else weight
    for gradient in gradients() if steps is None else steps:
        updater(key, mx.nd.array(gradient), weight)
    return weight


@pytest.mark.parametrize("name", mxnet_optimizer.TABLE)
def test_state_resumes_bit_exactly_also_twice(name):
    """An updater that has loaded a state can save it before its first step."""
    whole = stepped(Updater(spec(name))).asnumpy()
    first = Updater(spec(name))
    weight = stepped(first, steps=gradients()[:3])
    second, third = Updater(spec(name)), Updater(spec(name))
    second.load(first.state())
    third.load(second.state())
    assert third.state().keys() == first.state().keys() and "3/updates" in third.state()
    assert np.array_equal(stepped(third, weight, gradients()[3:]).asnumpy(), whole)


def test_loading_replaces_the_previous_state():
    updater = Updater(spec("adam"))
    stepped(updater)
    updater.load({})
    assert updater.state() == {}
    assert np.array_equal(stepped(updater).asnumpy(), stepped(Updater(spec("adam"))).asnumpy())


@pytest.mark.parametrize(
    "state, essentials",
    [({"3/0": np.zeros(5)}, ["key 3", "(5,)", "expected (7,)"]), ({"3/updates": np.array(4)}, ["key 3", "None"])],
)
def test_a_state_of_another_network_is_refused_at_the_keys_first_step(state, essentials):
    updater = Updater(spec("sgd"))
    updater.load(state)
    with pytest.raises(UserError) as caught:
        stepped(updater)
    for essential in essentials:
        assert essential in str(caught.value)


@pytest.mark.parametrize("name", ["momentum", "3/momentum", "x/0", "/updates", ""])
def test_a_state_with_other_names_is_refused(name):
    with pytest.raises(ValueError, match="KEY/updates"):
        Updater(spec("sgd")).load({name: np.zeros(7)})


def test_the_learning_rate_is_live_and_keys_have_multipliers():
    keys = {"1": {"wd_mult": 0.0}, "2": {"lr_mult": 10.0, "wd_mult": 0.0}}
    updater, ones = Updater({"name": "sgd", "lr": 0.1, "wd": 0.5, "keys": keys}), [np.ones(7, np.float32)]
    found = []
    for key, rate in ((0, 0.1), (1, 0.1), (2, 0.1), (1, 0.2)):
        updater.set_learning_rate(rate)
        found.append(1 - stepped(updater, mx.nd.ones(7), ones, key).asnumpy()[0])
    assert found == [pytest.approx(value) for value in (0.15, 0.1, 1.0, 0.2)]


def test_lars_has_one_rate_for_what_is_no_weight():
    given = mx.optimizer.LARS(momentum=0.5, param_idx2name={0: "fc_weight", 1: "fc_bias", 2: "bn_gamma"})
    found = spec_of(given)
    assert (found["name"], found["momentum"], found["eta"]) == ("lars", 0.5, 0.001)
    assert found["keys"] == {
        "0": {"lr_mult": 1.0, "wd_mult": 1.0},
        "1": {"lr_mult": 1.0, "wd_mult": 0.0, "layerwise": False},
        "2": {"lr_mult": 1.0, "wd_mult": 0.0, "layerwise": False},
    }


@pytest.mark.parametrize("kind", ["Nadam", "DCASGD"])
def test_classes_that_ours_replace_are_accepted(kind):
    assert spec_of(getattr(mx.optimizer, kind)(wd=0.25))["wd"] == 0.25


class Mine(mx.optimizer.SGD):
    """A program's own optimizer."""


@pytest.mark.parametrize("kind", [mx.optimizer.LBSGD, mx.optimizer.SGLD, Mine])
def test_a_class_of_a_program_or_with_options_that_ours_lacks_is_refused(kind):
    with pytest.raises(UserError, match=f"{kind.__name__} cannot run on the servers.* sgd, nag.*update_on_kvstore 0"):
        spec_of(kind())


@pytest.mark.parametrize(
    "wrong, essentials",
    [
        ({"name": "lion"}, ["'lion'", "sgd, nag", "adam"]),
        ({}, ["unknown optimizer ''"]),
        ({"name": "sgd", "beta1": 0.9}, ["sgd takes lr, momentum", "'beta1'"]),
        ({"name": "sgd", "lr": "0.1"}, ["lr='0.1'", "number"]),
        ({"name": "sgd", "wd": float("nan")}, ["wd=nan", "finite"]),
        ({"name": "sgd", "momentum": [0.9]}, ["momentum=[0.9]"]),
        ({"name": "sgd", "keys": {"a": {"wd_mult": 0.0}}}, ["keys", "'a'"]),
        ({"name": "sgd", "keys": {"1": {"momentum": 0.0}}}, ["keys", "lr_mult, wd_mult"]),
        ({"name": "sgd", "keys": {"1": 3}}, ["keys", "lr_mult, wd_mult"]),
    ],
)
def test_the_error_for_a_wrong_spec_lists_what_is_valid(wrong, essentials):
    with pytest.raises(ValueError) as caught:
        make(wrong)
    for essential in essentials:
        assert essential in str(caught.value)


# -- MXNet's own objects as specs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", mxnet_optimizer.TABLE)
def test_an_optimizer_as_a_spec_makes_the_same_steps(name):
    numbers = {"rescale_grad": 0.3, "clip_gradient": 1.5}
    original = spec(name, **numbers, keys={"3": {"wd_mult": 0.5, "lr_mult": 2.0}})
    if mxnet_optimizer.TABLE[name].own is None:
        theirs = mx.optimizer.create(name, learning_rate=0.1, wd=0.01, **EXTRA.get(name, {}), **numbers)
        theirs.set_wd_mult({3: 0.5})
        theirs.set_lr_mult({3: 2.0})
        expected = stepped(mx.optimizer.get_updater(theirs)).asnumpy()
        tolerance = 1e-5 if name == "lamb" else 0  # MXNet's joins several keys
        np.testing.assert_allclose(stepped(Updater(original)).asnumpy(), expected, rtol=tolerance)
    again = spec_of(make(original))
    assert np.array_equal(stepped(Updater(again)).asnumpy(), stepped(Updater(original)).asnumpy())
    assert not np.array_equal(stepped(Updater(again)).asnumpy(), stepped(Updater(spec(name))).asnumpy())


def test_parameter_names_select_weight_decay_as_in_mxnets_module():
    names = {0: "fc_weight", 1: "fc_bias"}
    found = spec_of(mx.optimizer.SGD(learning_rate=0.3, momentum=0.9, wd=0.1, param_idx2name=names))
    assert (found["name"], found["lr"], found["momentum"], found["wd"]) == ("sgd", 0.3, 0.9, 0.1)
    assert {key: numbers["wd_mult"] for key, numbers in found["keys"].items()} == {"0": 1.0, "1": 0.0}
    parameter = mx.gluon.Parameter("fc_bias", shape=(3,), wd_mult=0.0, lr_mult=2.0)  # gluon's do too
    found = spec_of(mx.optimizer.Adam(param_dict={4: parameter}))
    assert found["keys"] == {"4": {"lr_mult": 2.0, "wd_mult": 0.0}}


def test_a_learning_rate_schedule_is_refused_with_a_fix():
    with pytest.raises(UserError, match="lr_scheduler.*set_learning_rate"):
        spec_of(mx.optimizer.SGD(lr_scheduler=mx.lr_scheduler.FactorScheduler(1)))
