"""`job` and `alone`: whole jobs in this process, which all tests of a module share. `freed`: for tests of large
networks."""

import contextlib
import ctypes
import gc
import importlib.util
from collections.abc import Iterator

import pytest

from tests.kvstore.whole_job import WholeJob

collect_ignore_glob = []
if importlib.util.find_spec("torch") is None:
    collect_ignore_glob = ["test_torch.py", "test_torch_[!r]*", "test_optimizers*"]  # test_torch_release.py needs none
if importlib.util.find_spec("mxnet") is None:  # which test_mxnet_compat.py does not need
    collect_ignore_glob += ["test_mxnet.py", "test_mxnet_[!c]*", "test_optimizers.py", "test_same_mathematics.py"]


@pytest.fixture(scope="module")
def job() -> Iterator[WholeJob]:
    yield from _ended(WholeJob(workers=2, servers=1))


@pytest.fixture(scope="module")
def alone() -> Iterator[WholeJob]:
    """A job of dist_local, whose workers and servers are all on this host."""
    yield from _ended(WholeJob("dist_local", workers=2, servers=1))


def _ended(made: WholeJob) -> Iterator[WholeJob]:
    yield made
    made.all(lambda store: store.close())
    assert made.ended() == ["", ""]
    made.close()


@pytest.fixture
def freed() -> Iterator[None]:
    """Gives the memory of a test's networks back: they are in cycles, and glibc keeps what was freed."""
    yield
    gc.collect()
    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
