"""benchmarks/unauthenticated.py measures jobs with and without unauthenticated peers."""

import os

import pytest

from tests.benchmarks.as_a_user import figures, run

root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a network namespace")
pytestmark = [pytest.mark.thorough, root]


def test_every_kind_of_run_has_its_figures():
    result = figures("unauthenticated.py --repeats 1 --steps 20 --rate 200", how=run)
    for kind, each in result["runs"].items():
        assert 0 < each["median"]["median"] <= each["p95"]["median"] < each["start"]["median"]
        assert (each["connections"]["median"] > 50) == (kind != "nobody")
    assert set(result["ratio_to_elsewhere"]) == {"median", "p95"}
