"""A plugin of pytest (-p tests.device.plugin) that gives its process a fake CUDA device. A test with a race fails."""

import pytest

from tests.device import fake_cuda

fake_cuda.install()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    fake_cuda.take_races()
    result = yield
    if item.get_closest_marker("races") is None:
        fake_cuda.check()
    return result
