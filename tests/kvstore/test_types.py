"""The kvstore types and what their table decides; which store `create` returns, and the stores that need no servers."""

import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dmltrain import kvstore
from dmltrain.env import Environment
from dmltrain.errors import UserError
from dmltrain.kvstore import types

ROOT = Path(__file__).parents[2]


def test_the_names_of_0_4_keep_their_meaning():
    names = dict.fromkeys(["local", "device"], "local")
    names |= dict.fromkeys(["dist_sync", "dist_device_sync", "dist_sync_device"], "dist_sync")
    names |= {"dist_async": "dist_async", "dist_async_device": "dist_async", "dist_ssp": "dist_ssp"}
    assert names.items() <= kvstore.TYPES.items()


@pytest.mark.parametrize(
    "name, given, bound",
    [
        ("local", None, 0.0),
        ("dist_device_sync", None, 0.0),
        ("dist_async_device", None, math.inf),
        ("dist_ssp", None, 3.0),
        ("dist_ssp", 0, 0.0),
        ("dist_ssp", 7, 7.0),
    ],
)
def test_bound_on_staleness(name, given, bound):
    assert types.find(name).bound(given) == bound


@pytest.mark.parametrize(
    "name, given, message",
    [
        ("dist_async", 3, "staleness is an option of kvstore dist_ssp; this is dist_async"),
        *(("dist_ssp", given, f"staleness {given!r}: expected 0 or more") for given in (-1, math.nan, "4", True)),
    ],
)
def test_an_invalid_bound_is_explained(name, given, message):
    with pytest.raises(UserError, match=re.escape(message)):
        types.find(name).bound(given)


@pytest.mark.parametrize(
    "name, on_workers, on_servers, sums, together, factors, elastic",
    [
        ("local", True, False, False, True, False, False),
        ("dist_sync", True, True, True, True, True, True),
        ("dist_async", False, True, False, False, False, True),
        ("dist_ssp", False, True, False, False, False, True),
        ("dist_local", True, False, True, False, False, False),
    ],
)
def test_where_the_optimizer_runs_and_what_workers_do_together(
    name, on_workers, on_servers, sums, together, factors, elastic
):
    kind = types.find(name)
    assert kind.steps_on_servers(False) is kind.needs_server_optimizer is not on_workers
    assert kind.steps_on_servers(True) is on_servers
    assert kind.sums_in_host is sums, "only synchronous workers are summed in their host"
    assert kind.steps_together is together and kind.takes_factors is factors
    assert kind.can_be_elastic is elastic


def test_averages_have_defaults_of_which_each_can_be_changed():
    kind, defaults = types.find("dist_local"), types.find("dist_local").local_steps
    assert kind.averaging() == defaults
    assert kind.averaging(7) == replace(defaults, steps=7)
    assert kind.averaging(None, 0.5) == replace(defaults, outer_lr=0.5)
    assert kind.averaging(None, None, 0.25) == replace(defaults, outer_momentum=0.25)
    assert all(each.averaging() is None for each in types.TABLE if each is not kind)


@pytest.mark.parametrize(
    "name, option, value, expected",
    [
        ("dist_sync", "local_steps", 5, None),
        ("local", "outer_lr", 1.0, None),
        ("dist_ssp", "outer_momentum", 0.0, None),
        *(("dist_local", "local_steps", value, "a whole number of steps, at least 1") for value in (0, 2.5, True)),
        *(("dist_local", "outer_lr", value, "a number above 0") for value in (0.0, math.nan, math.inf)),
        *(("dist_local", "outer_momentum", value, "a number from 0 to below 1") for value in (1.0, -0.1, math.nan)),
    ],
)
def test_averages_that_cannot_be_are_explained(name, option, value, expected):
    of_another_type = f"{option} is an option of kvstore dist_local; this is {name}"
    with pytest.raises(
        UserError, match=re.escape(f"{option} {value}: expected {expected}" if expected else of_another_type)
    ):
        types.find(name).averaging(**{option: value})


def test_no_code_compares_the_names_of_types():
    compared = re.compile(r"""(==|!=|\bin\b|startswith)\s*\(?\s*["'](dist|local|device)""")
    for path in (ROOT / "dmltrain").rglob("*.py"):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            assert not compared.search(line), f"{path}:{number}: ask KVStore.kvstore_type: {line.strip()}"


ALONE = Environment()
LAUNCHED = Environment(launched=True, num_workers=2)


@pytest.mark.parametrize(
    "kind, options, environment, message",
    [
        ("dist", {}, ALONE, "local, device, dist_sync"),
        ("dist_sync", {}, ALONE, "dmltrain-launch -n WORKERS"),
        ("dist_sync", {}, LAUNCHED, "at least one server, .*-s 0"),
        ("dist_sync", {"transport": "udp"}, LAUNCHED, "transport='udp': .* auto, tcp, shm"),
        ("dist_sync", {"host_sum": "on"}, LAUNCHED, "host_sum='on': .* auto, off"),
        ("dist_sync", {"server_shares": "link"}, LAUNCHED, "server_shares='link': .* equal, links"),
        ("dist_sync", {"staleness": 3}, LAUNCHED, "staleness is .* dist_ssp"),
        ("dist_local", {"backend": "mxnet"}, LAUNCHED, "dist_local: MXNet .* local, "),
        ("dist_ssp", {"backend": "mxnet"}, LAUNCHED, "MXNet .* local, dist_sync, dist_async"),
    ],
)
def test_mistakes_are_explained(kind, options, environment, message):
    with pytest.raises(UserError, match=message):
        kvstore.create(kind, environment=environment, **options)


@pytest.mark.parametrize("kind", ["local", "device"])
def test_a_single_worker_sums_its_devices(kind):
    kv = kvstore.create(kind, environment=ALONE)
    kv.init(["a", "b"], [np.zeros(2, np.float32), np.ones((2, 2), np.float32)])
    kv.push("a", [np.array([1, 2], np.float32), np.array([10, 20], np.float32)])
    outs = [np.zeros(2, np.float32), np.zeros(2, np.float32)]
    kv.pull("a", outs)
    kv.pull("b", square := np.zeros((2, 2), np.float32))
    assert [out.tolist() for out in (*outs, square)] == [[11, 22], [11, 22], [[1, 1], [1, 1]]]


def test_an_optimizer_in_the_local_store_and_its_state(tmp_path):
    stores = []
    for _ in range(2):
        kv = kvstore.create("local", environment=ALONE)
        kv.init("w", np.zeros(3, np.float32))
        kv.set_optimizer({"name": "sgd", "lr": 0.5, "momentum": 0.9})
        stores.append(kv)
    first, second = stores
    gradient, out = np.ones(3, np.float32), np.zeros(3, np.float32)
    first.pushpull("w", gradient, out)
    assert out.tolist() == [-0.5] * 3
    first.save_optimizer_states(str(tmp_path / "states"))
    second.push("w", gradient)
    second.load_optimizer_states(str(tmp_path / "states"))
    for kv in stores:
        kv.pushpull("w", gradient, out)
        assert out.tolist() == pytest.approx([-0.5 - 0.5 * 1.9] * 3)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda kv: kv.set_optimizer({"name": "magic"}), "unknown optimizer 'magic'"),
        (lambda kv: kv.set_optimizer({"name": "sgd", "lr": 0.1, "speed": 3}), "sgd takes lr, momentum"),
        (lambda kv: kv.set_optimizer({"name": "sgd", "lr": "fast"}), "lr='fast': expected a finite number"),
        (lambda kv: kv.push("x", np.zeros(1, np.float32)), "'x' was not declared: call init first"),
        (lambda kv: kv.init(["a", "b"], [np.zeros(1, np.float32)]), "2 keys but 1 values"),
        (lambda kv: kv.init("a", np.zeros(1, np.int64)), "float32 or float64, .* int64"),
        (lambda kv: kv.push("x", np.zeros(1, np.float32), rate=float("nan")), "rate is nan, expected a finite number"),
        (lambda kv: kv.set_gradient_compression({"type": "2bit"}), "compression '2bit' is not available"),
    ],
)
def test_wrong_calls_are_explained(call, message):
    kv = kvstore.create("local", environment=ALONE)
    kv.init("w", np.zeros(3, np.float32))
    with pytest.raises(UserError, match=message):
        call(kv)
