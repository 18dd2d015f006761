"""A plugin of pytest (-p tests.device.plugin) that gives its process a fake CUDA device. A test with a race fails.
Trainers of the files ON_GPUS compute there, though their options name the CPU or nothing."""

import pytest

from dmltrain.options.table import Options
from tests.device import fake_cuda

fake_cuda.install()
ON_GPUS = ("test_trainers.py",)


@pytest.fixture(autouse=True)
def gpus_for_cpus(request, monkeypatch):
    if request.path.name in ON_GPUS:
        names = property(lambda options: _names(len(options.devices) or 1))
        monkeypatch.setattr(Options, "device_names", names)


def _names(count):
    return tuple(f"gpu:{number % fake_cuda.DEVICES}" for number in range(count))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    fake_cuda.take_races()
    result = yield
    if item.get_closest_marker("races") is None:
        fake_cuda.check()
    return result
