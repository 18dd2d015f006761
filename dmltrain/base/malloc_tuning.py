"""Keeps memory that a training process frees in the process, for its next step.

A training step allocates about what the step before has freed. glibc returns freed memory to the kernel (blocks over
32 MiB always). When the process allocates again, the kernel has to clear each page. On CPUs that takes up to a fifth of
a step (docs/performance.md). See mallopt(3), M_TRIM_THRESHOLD and M_MMAP_MAX.
"""

from __future__ import annotations

import ctypes
import os

TRIM_THRESHOLD, MMAP_MAX = -1, -4  # numbers of glibc's malloc.h
OWN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_")


def keep_freed_memory() -> bool:
    """Keep freed memory from now on. Returns False, and changes nothing, if the C library is not glibc, or if the
    environment has settings for glibc's malloc."""
    if any(name in os.environ for name in OWN) or "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    return all([library.mallopt(TRIM_THRESHOLD, -1), library.mallopt(MMAP_MAX, 0)])
