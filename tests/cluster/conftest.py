"""`testbed`: five hosts, whole and idle before every test; `front`: a launcher on the host `login`.

The checkout, this Python and pytest's folders (`tmp_path` too) are seen by all hosts; anything else in /tmp is not.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cluster.launching import Front
from tests.cluster.layout import Settings
from tests.cluster.testbed import Testbed, missing

ROOT = Path(__file__).parents[2]
NAME = "pytest"  # of the test beds made here, with the pid of the pytest
DATA = ("DMLTRAIN_DATA_DIR", "DMLTRAIN_LOGS_DIR")


@pytest.fixture(scope="session")
def needs_testbed() -> None:
    lacking = missing()
    if lacking:
        pytest.skip(f"no test bed: it needs {lacking}")


@contextmanager
def made_bed(name: str, tmp_path_factory: pytest.TempPathFactory, hosts: int = 5) -> Iterator[Testbed]:
    """A test bed by a name of its own, which is there until the end of the block."""
    data = [os.environ[each] for each in DATA if os.path.isdir(os.environ.get(each, ""))]
    share = [str(ROOT), sys.prefix, sys.base_prefix, str(tmp_path_factory.getbasetemp()), *data]
    bed = Testbed(f"{NAME}{os.getpid()}{name}")
    try:
        bed.up(Settings(hosts=hosts, share=tuple(map(os.path.abspath, share))))
        yield bed
    finally:
        bed.down()


@pytest.fixture(scope="session")
def _testbed(needs_testbed: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Testbed]:
    with made_bed("", tmp_path_factory) as bed:
        yield bed


@pytest.fixture
def testbed(_testbed: Testbed) -> Iterator[Testbed]:
    """Hosts login and h1 to h5, whole and idle. What a test leaves there is killed at once, and repaired before the
    next one, whose `up` also thaws."""
    if not _testbed.settled():
        _testbed.up()
    yield _testbed
    _testbed.sweep()


@pytest.fixture
def front(testbed: Testbed, tmp_path: Path) -> Front:
    """The front door of the launcher on `login`, with `tmp_path` as its folder."""
    return Front(testbed, tmp_path)


@pytest.fixture
def own_front(testbed: Testbed, tmp_path: Path) -> Front:
    """The same for launchers in interpreters of their own: to be stopped or measured, or about what others see."""
    return Front(testbed, tmp_path, own=True)


@pytest.fixture
def other(needs_testbed: None) -> Iterator[Testbed]:
    """A second test bed by another name, which the test itself brings up."""
    bed = Testbed(f"other{os.getpid()}")
    yield bed
    bed.down()
