"""The kvstore types: one table decides names, bounds, and where the optimizer runs."""

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from dmltrain import kvstore
from dmltrain.errors import UserError
from dmltrain.kvstore import types

ROOT = Path(__file__).parents[2]


def test_the_names_of_0_4_keep_their_meaning():
    names = {
        "local": "local",
        "device": "local",
        "dist_sync": "dist_sync",
        "dist_device_sync": "dist_sync",
        "dist_sync_device": "dist_sync",
        "dist_async": "dist_async",
        "dist_async_device": "dist_async",
        "dist_ssp": "dist_ssp",
    }
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
        ("dist_async", 3, "staleness is an option of kvstore dist_ssp; this is dist_async: use dist_ssp, or leave"),
        ("dist_ssp", -1, "staleness -1: expected 0 or more clocks"),
        ("dist_ssp", math.nan, "staleness nan: expected 0 or more clocks"),
        ("dist_ssp", "4", "staleness '4': expected 0 or more clocks"),
        ("dist_ssp", True, "staleness True: expected 0 or more clocks"),
    ],
)
def test_an_invalid_bound_is_explained(name, given, message):
    with pytest.raises(UserError, match=re.escape(message)):
        types.find(name).bound(given)


@pytest.mark.parametrize(
    "name, on_workers, on_servers",
    [
        ("local", True, False),
        ("dist_sync", True, True),
        ("dist_async", False, True),
        ("dist_ssp", False, True),
        ("dist_local", True, False),
    ],
)
def test_where_the_optimizer_runs(name, on_workers, on_servers):
    kind = types.find(name)
    assert kind.steps_on_servers(False) is not on_workers
    assert kind.steps_on_servers(True) is on_servers
    assert kind.needs_server_optimizer is (not on_workers)


@pytest.mark.parametrize(
    "name, sums",
    [("local", False), ("dist_sync", True), ("dist_async", False), ("dist_ssp", False), ("dist_local", True)],
)
def test_only_synchronous_workers_are_summed_in_their_host(name, sums):
    assert types.find(name).sums_in_host is sums


@pytest.mark.parametrize(
    "name, together, factors, elastic",
    [
        ("local", True, False, False),
        ("dist_sync", True, True, True),
        ("dist_async", False, False, True),
        ("dist_ssp", False, False, True),
        ("dist_local", False, False, False),
    ],
)
def test_which_workers_make_each_step_together(name, together, factors, elastic):
    kind = types.find(name)
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
    "name, given, message",
    [
        ("dist_sync", {"local_steps": 5}, "local_steps is an option of kvstore dist_local; this is dist_sync"),
        ("local", {"outer_lr": 1.0}, "outer_lr is an option of kvstore dist_local; this is local"),
        ("dist_ssp", {"outer_momentum": 0.0}, "outer_momentum is an option of kvstore dist_local; this is dist_ssp"),
        ("dist_local", {"local_steps": 0}, "local_steps 0: expected a whole number of steps, at least 1"),
        ("dist_local", {"local_steps": 2.5}, "local_steps 2.5: expected a whole number of steps, at least 1"),
        ("dist_local", {"local_steps": True}, "local_steps True: expected a whole number of steps, at least 1"),
        ("dist_local", {"outer_lr": 0.0}, "outer_lr 0.0: expected a number above 0; 1 without momentum is the mean"),
        ("dist_local", {"outer_lr": math.nan}, "outer_lr nan: expected a number above 0"),
        ("dist_local", {"outer_lr": math.inf}, "outer_lr inf: expected a number above 0"),
        ("dist_local", {"outer_momentum": 1.0}, "outer_momentum 1.0: expected a number from 0 to below 1; 0 is none"),
        ("dist_local", {"outer_momentum": -0.1}, "outer_momentum -0.1: expected a number from 0 to below 1"),
        ("dist_local", {"outer_momentum": math.nan}, "outer_momentum nan: expected a number from 0 to below 1"),
    ],
)
def test_averages_that_cannot_be_are_explained(name, given, message):
    with pytest.raises(UserError, match=re.escape(message)):
        types.find(name).averaging(**given)


def test_no_code_compares_the_names_of_types():
    compared = re.compile(r"""(==|!=|\bin\b|startswith)\s*\(?\s*["'](dist|local|device)""")
    for path in (ROOT / "dmltrain").rglob("*.py"):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            assert not compared.search(line), f"{path}:{number}: ask KVStore.kvstore_type: {line.strip()}"
