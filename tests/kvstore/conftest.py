"""What tests of schedulers, servers and relays that run as threads share."""

import io
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from dmltrain.kvstore import log


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    """The log lines so far, at each call, also while threads write them. (capfd reads and then cuts, and loses a line
    that comes between.)"""
    text = io.StringIO()
    monkeypatch.setattr(log, "sys", SimpleNamespace(stderr=text))
    return text.getvalue
