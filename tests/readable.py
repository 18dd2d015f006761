"""Files that are ready now. `select.select` refuses descriptors above 1023, and a process of tests may have more."""

import selectors
from collections.abc import Iterable
from typing import Any


def readable(files: Iterable[Any], seconds: float) -> list[Any]:
    """Those of `files` (descriptors, or objects with one) that can be read within `seconds`, or nothing."""
    with selectors.PollSelector() as selector:
        for file in files:
            selector.register(file, selectors.EVENT_READ)
        return [key.fileobj for key, _ in selector.select(seconds)]


def writable(file: Any, seconds: float = 0.0) -> bool:
    """Whether `file` can be written within `seconds`."""
    with selectors.PollSelector() as selector:
        selector.register(file, selectors.EVENT_WRITE)
        return bool(selector.select(seconds))
