"""Memory that is shared with servers of this host, registered with the driver, so that a GPU copies straight from and
to it. Where the driver refuses, gradients take a copy more, through pinned memory."""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Sequence
from typing import Any

from dmltrain.backends.torch import devices
from dmltrain.base.arrays import Array

Range = tuple[int, int]  # the first address, and the one after the last
_known: dict[int, list[Range]] = {}  # of each whole memory, by its address: what is registered


def register(arrays: Sequence[Array]) -> None:
    """Register these parts of one memory, until that is freed."""
    driver = devices.driver()
    if driver is None or not arrays:
        return
    whole = arrays[0]
    while isinstance(whole.base, type(whole)):
        whole = whole.base
    known = _known.setdefault(_start(whole), [])
    if not known:
        weakref.finalize(whole, _forget, driver, _start(whole)).atexit = False
    for wanted in pages([(_start(array), _start(array) + array.nbytes) for array in arrays]):
        for start, end in missing(wanted, known):
            if _succeeds(driver.cudaHostRegister, start, end - start, 0):
                known.append((start, end))


def pages(ranges: Sequence[Range]) -> list[Range]:
    """The whole pages that these ranges touch, as few ranges in order."""
    found: list[Range] = []
    for first, last in sorted(ranges):
        start, end = first // mmap.PAGESIZE * mmap.PAGESIZE, -(-last // mmap.PAGESIZE) * mmap.PAGESIZE
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        elif start < end:
            found.append((start, end))
    return found


def missing(wanted: Range, known: Sequence[Range]) -> list[Range]:
    """The parts of `wanted` that no known range has."""
    start, end = wanted
    found: list[Range] = []
    for first, last in sorted(known):
        if last > start and first < end:
            found += [(start, first)] if first > start else []
            start = max(start, last)
    return [*found, (start, end)] if start < end else found


def _succeeds(call: Any, *arguments: int) -> bool:
    try:
        succeeds = int(call(*arguments)) == 0
    except RuntimeError:
        succeeds = False
    if not succeeds:
        devices.forget_error()
    return succeeds


def _forget(driver: Any, whole: int) -> None:
    for start, _ in _known.pop(whole, []):
        _succeeds(driver.cudaHostUnregister, start)


def _start(array: Array) -> int:
    return int(array.__array_interface__["data"][0])
