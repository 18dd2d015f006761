"""The benchmark of --balance runs, and reports both kinds of jobs."""

import json

import pytest

from tests.benchmarks.as_a_user import called


@pytest.mark.thorough
def test_both_kinds_of_jobs_are_compared():
    small = "balance.py --workers 2 --batch 4 --steps 12 --epochs 2 --turns 1 --format json"
    done = called(small, "--network", "--network mlp")
    assert done.returncode == 0, done.stderr
    slow, equal = json.loads(done.stdout)["measured"]
    assert (slow["factor"], slow["ceiling"], equal["factor"], equal["ceiling"]) == (2.0, 1.5, 1.0, 1.0)
    for each in (slow, equal):
        assert set(each["speeds"]) == {"equal parts", "--balance"} and each["ratio"] > 0
