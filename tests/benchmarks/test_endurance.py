"""benchmarks/endurance.py: what it reads from logs. The job itself takes half an hour and five hosts."""

import importlib
import time
from pathlib import Path

import pytest

LOGS = """2026-11-27 08:53:44,469 Node[0] View 1 after op 0: workers 0, 1, 2, 3, 4
2026-11-27 08:54:12,965 Node[2] View 2 after op 46: workers 0, 1, 2, 4; 32 samples of this epoch are dealt again
2026-11-27 08:54:12,865 Node[0] View 2 after op 46: workers 0, 1, 2, 4; 32 samples of this epoch are dealt again
2026-11-27 08:54:32,881 Node[0] View 3 after op 76: workers 0, 1, 2, 4
2026-11-27 08:54:45,012 Node[0] View 4 after op 108: workers 0, 1, 2; 40 samples of this epoch are dealt again
2026-11-27 08:54:45,013 Node[0] Epoch[0] View 9 after op 108
"""


@pytest.fixture
def endurance(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    return importlib.import_module("endurance")


def at(text):
    return time.mktime(time.strptime(f"2026-11-27 {text}", "%Y-%m-%d %H:%M:%S"))


def test_the_seconds_until_the_next_view_of_a_loss(endurance):
    views = endurance.entered(LOGS, {"2", "4", "9"})
    assert views == [at("08:54:12") + 0.865, at("08:54:45") + 0.012], "the first worker's, of those with a loss"
    happened = [
        {"at": at("08:54:12"), "what": "kill a worker"},
        {"at": at("08:54:13"), "what": "kill the scheduler"},
        {"at": at("08:54:37"), "what": "cut from another"},
        {"at": at("08:54:42"), "what": "kill a worker"},
        {"at": at("08:55:00"), "what": "switch off"},
    ]
    found = endurance.until_the_next(happened, views)
    assert found == {"kill a worker": {"median": pytest.approx((0.865 + 3.012) / 2), "of": 2}}, "and not of the others"
