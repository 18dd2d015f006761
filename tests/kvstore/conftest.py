"""What tests of schedulers, servers and relays that run as threads share."""

import contextlib
import io
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from dmltrain.kvstore import log
from tests.kvstore.whole_job import WholeJob
from tests.waiting import wait_for


class Logged:
    """The log lines so far, also while threads write them. (capfd reads and then cuts, and loses a line that comes
    between.)"""

    def __init__(self) -> None:
        self.stderr = io.StringIO()

    @property
    def text(self) -> str:
        return self.stderr.getvalue()

    def wait_for(self, text: str) -> None:
        wait_for(lambda: text in self.text, lambda: f"{text!r} in the log:\n{self.text}")


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> Logged:
    found = Logged()
    monkeypatch.setattr(log, "sys", SimpleNamespace(stderr=found.stderr))
    return found


@pytest.fixture
def closed_at_the_end() -> Iterator[Callable]:
    """closed_at_the_end(made) -> made"""
    with contextlib.ExitStack() as stack:
        yield lambda made: stack.enter_context(contextlib.closing(made))


@pytest.fixture
def whole_job(closed_at_the_end: Callable) -> Callable[..., WholeJob]:
    """whole_job(...) -> WholeJob(...), which is closed at the end."""
    return lambda *words, **options: closed_at_the_end(WholeJob(*words, **options))
