"""benchmarks/unauthenticated.py measures jobs with and without unauthenticated peers."""

import json
import os

import pytest

from tests.benchmarks.as_a_user import run

pytestmark = [
    pytest.mark.alone,
    pytest.mark.thorough,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a network namespace"),
]


def test_every_kind_of_run_has_its_figures():
    done = run("unauthenticated.py --format json --repeats 1 --steps 20 --rate 200", timeout=120)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    for kind, figures in result["runs"].items():
        assert 0 < figures["median"]["median"] <= figures["p95"]["median"] < figures["start"]["median"]
        assert (figures["connections"]["median"] > 50) == (kind != "nobody")
    assert set(result["ratio_to_elsewhere"]) == {"median", "p95"}
