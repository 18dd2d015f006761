"""The kvstore types: one table decides names, bounds, and where the optimizer runs."""

import math
import re
from pathlib import Path

import pytest

from dmltrain import kvstore
from dmltrain.errors import UserError
from dmltrain.kvstore import types

ROOT = Path(__file__).parents[2]


def test_the_names_of_0_4_keep_their_meaning():
    assert dict(kvstore.TYPES) == {
        "local": "local",
        "device": "local",
        "dist_sync": "dist_sync",
        "dist_device_sync": "dist_sync",
        "dist_sync_device": "dist_sync",
        "dist_async": "dist_async",
        "dist_async_device": "dist_async",
        "dist_ssp": "dist_ssp",
    }


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
        ("dist_async", 3, "--staleness is an option of kvstore dist_ssp; this is dist_async"),
        ("dist_ssp", -1, "--staleness -1: expected 0 or more clocks"),
        ("dist_ssp", math.nan, "--staleness nan: expected 0 or more clocks"),
    ],
)
def test_an_invalid_bound_is_explained(name, given, message):
    with pytest.raises(UserError, match=re.escape(message)):
        types.find(name).bound(given)


@pytest.mark.parametrize(
    "name, on_workers, on_servers",
    [("local", True, False), ("dist_sync", True, True), ("dist_async", False, True), ("dist_ssp", False, True)],
)
def test_where_the_optimizer_runs(name, on_workers, on_servers):
    kind = types.find(name)
    assert kind.steps_on_servers(False) is not on_workers
    assert kind.steps_on_servers(True) is on_servers
    assert kind.needs_server_optimizer is (not on_workers)


@pytest.mark.parametrize(
    "name, sums", [("local", False), ("dist_sync", True), ("dist_async", False), ("dist_ssp", False)]
)
def test_only_synchronous_workers_are_summed_in_their_host(name, sums):
    assert types.find(name).sums_in_host is sums


def test_no_code_compares_the_names_of_types():
    compared = re.compile(r"""(==|!=|\bin\b|startswith)\s*\(?\s*["'](dist|local|device)""")
    for path in (ROOT / "dmltrain").rglob("*.py"):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            assert not compared.search(line), f"{path}:{number}: ask KVStore.kvstore_type: {line.strip()}"
