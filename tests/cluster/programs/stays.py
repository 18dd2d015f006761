"""Two tests with test beds that never end, for tests/test_leftovers.py."""

import signal

import pytest


@pytest.mark.parametrize("number", [1, 2])
def test_stays(testbed, number):
    signal.pause()
