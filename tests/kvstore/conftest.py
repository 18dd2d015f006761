"""What tests of schedulers, servers and relays that run as threads share."""

import io
import time
from types import SimpleNamespace

import pytest

from dmltrain.kvstore import log

SECONDS = 30.0  # for a line, on a busy machine


class Logged:
    """The log lines so far, also while threads write them. (capfd reads and then cuts, and loses a line that comes
    between.)"""

    def __init__(self) -> None:
        self.stderr = io.StringIO()

    @property
    def text(self) -> str:
        return self.stderr.getvalue()

    def wait_for(self, text: str) -> None:
        deadline = time.monotonic() + SECONDS
        while text not in self.text and time.monotonic() < deadline:
            time.sleep(0.005)
        assert text in self.text


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> Logged:
    found = Logged()
    monkeypatch.setattr(log, "sys", SimpleNamespace(stderr=found.stderr))
    return found


@pytest.fixture
def begin_job():
    """Begin a WholeJob with these arguments. All end with the test."""
    from tests.kvstore.whole_job import WholeJob

    jobs = []

    def begin(*words, **options):
        jobs.append(WholeJob(*words, **options))
        return jobs[-1]

    yield begin
    for each in jobs:
        each.close()
