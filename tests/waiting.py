"""The way in which tests wait: for a condition, never for a time."""

import time
from collections.abc import Callable
from typing import TypeVar

import pytest

SECONDS = 120.0  # for what takes a fraction of a second on an idle machine
Found = TypeVar("Found")


def wait_for(condition: Callable[[], Found], what: str | Callable[[], str], seconds: float = SECONDS) -> Found:
    """What `condition` returns once it is true. Fails the test after `seconds`, and says what did not happen."""
    end = time.monotonic() + seconds
    while True:
        began = time.monotonic()
        if found := condition():
            return found
        if began > end:
            pytest.fail(f"not within {seconds:.0f} s: {what() if callable(what) else what}")
        time.sleep(min(max(0.005, 5 * (time.monotonic() - began)), 1.0))  # a look at all processes takes CPU from them
