"""Which descriptors this process has open, so that a test sees what it leaves open itself."""

import gc
import os


def descriptors() -> set[str]:
    """Those that earlier tests left may be closed at any time: compare with <=."""
    gc.collect()
    return set(os.listdir("/proc/self/fd"))
