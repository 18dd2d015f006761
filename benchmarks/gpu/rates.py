"""Stage "machine": its rates, and whether memory that processes share can be registered with the driver."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
from collections.abc import Callable, Iterator

import machine
import numpy as np
import torch

from dmltrain.backends.torch import devices
from gpu.running import Asked, Row
from gpu.training import GPU, seconds

READ_ONLY = 8  # cudaHostRegisterReadOnly
QUERY = "nvidia-smi --query-gpu=name,driver_version,pcie.link.gen.current,pcie.link.width.current --format=csv,noheader"


def rows(asked: Asked) -> Iterator[Row]:
    size, least = (1 << 20, 0.0) if asked.small else (102 << 20, 0.5)
    yield {"gpu": devices.names([GPU]), "query": _query(), "torch": torch.__version__, **machine.describe()}
    yield from _copies(size, least)
    yield from _calls(least)
    yield from _registered(size, least)


def _query() -> str:
    try:
        return subprocess.run(QUERY.split(), capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


def _copies(size: int, least: float) -> Iterator[Row]:
    there = torch.zeros(size // 4, device=GPU)
    for name, host in (("pinned", torch.zeros(size // 4).pin_memory()), ("pageable", torch.zeros(size // 4))):
        yield _rate(f"{name} memory to the host", size, lambda host=host: host.copy_(there, non_blocking=True), least)
        yield _rate(f"{name} memory to the GPU", size, lambda host=host: there.copy_(host, non_blocking=True), least)
    yield {"rate": "memcpy", "GB_per_second": round(size / machine.memcpy_seconds(size) / 1e9, 1)}


def _rate(name: str, size: int, call: Callable[[], object], least: float) -> Row:
    return {"rate": name, "GB_per_second": round(size / seconds(call, least) / 1e9, 1)}


def _calls(least: float) -> Iterator[Row]:
    there, here = torch.zeros(1 << 18, device=GPU), torch.zeros(1 << 18).pin_memory()
    calls = {
        "kernel": lambda: there[:1].add_(1),
        "blocking copy of 1 MiB to the host": lambda: here.copy_(there),
        "copy of 1 MiB to the GPU": lambda: there.copy_(here, non_blocking=True),
    }
    for name, call in calls.items():
        yield {"call": name, "microseconds": round(seconds(call, least) * 1e6, 1)}


def _registered(size: int, least: float) -> Iterator[Row]:
    """An arena of this process, and one of another process, which is mapped read-only."""
    descriptor = os.memfd_create("arena")
    os.ftruncate(descriptor, size)
    own = np.frombuffer(mmap.mmap(descriptor, size), np.float32)
    other = np.frombuffer(mmap.mmap(descriptor, size, prot=mmap.PROT_READ), np.float32)
    for name, memory, flags in (("own", own, 0), ("other's", other, 0), ("other's, as read-only", other, READ_ONLY)):
        yield {"registered arena": name, **_register(memory, flags, least)}


def _register(memory: np.ndarray, flags: int, least: float) -> Row:
    """The driver's answer, 0 if it has registered the memory, and the rate at which the GPU then reads it."""
    driver, place = torch.cuda.cudart(), memory.ctypes.data
    try:
        code = int(driver.cudaHostRegister(place, memory.nbytes, flags))
    except RuntimeError as error:
        devices.forget_error()
        return {"answer": str(error)[:80]}
    if code:
        devices.forget_error()
        return {"answer": code}
    here = torch.frombuffer((ctypes.c_char * memory.nbytes).from_address(place), dtype=torch.float32)
    there = torch.zeros(memory.size, device=GPU)
    rate = memory.nbytes / seconds(lambda: there.copy_(here, non_blocking=True), least) / 1e9
    found = {"answer": code, "is_pinned": here.is_pinned(), "GB_per_second": round(rate, 1)}
    driver.cudaHostUnregister(place)
    return found
