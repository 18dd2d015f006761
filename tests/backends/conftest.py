"""`job`: a whole job in this process, which all tests of a module share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kvstore.whole_job import WholeJob


@pytest.fixture(scope="module")
def job() -> Iterator[WholeJob]:
    made = WholeJob(workers=2, servers=1)
    yield made
    made.all(lambda store: store.close())
    assert made.ended() == ["", ""]
    made.close()
