"""GPUs by a driver that the tests write: no machine of the tests has one."""

import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest

from dmltrain.usage import GpuUse, gpu
from tests.waiting import wait_for

DRIVER = r"""
#include <string.h>
int cuInit(unsigned flags) { return FAILS; }
int cuDeviceGet(int *device, int ordinal) { *device = 7 - ordinal; return ordinal > 1 ? 101 : 0; }
int UUID(unsigned char *uuid, int device) { memset(uuid, 0x10 + device, 16); return 0; }
"""
UUIDS = ["17171717-1717-1717-1717-171717171717", "16161616-1616-1616-1616-161616161616"]


@pytest.fixture
def driver(tmp_path):
    """Builds a CUDA driver with two devices."""
    compiler = shutil.which("cc")
    if not compiler:
        pytest.skip("no C compiler, which builds the driver")

    def build(function: str = "cuDeviceGetUuid", fails: int = 0) -> str:
        (tmp_path / "driver.c").write_text(DRIVER.replace("UUID", function).replace("FAILS", str(fails)))
        library = tmp_path / f"{function}{fails}.so"
        subprocess.run([compiler, "-shared", "-fPIC", "-o", library, tmp_path / "driver.c"], check=True)
        return str(library)

    return build


class Nvml(SimpleNamespace):
    """pynvml of a machine with GPUs: UUID -> (percent busy, bytes in use)."""

    NVMLError, NVMLError_NotFound = pynvml.NVMLError, pynvml.NVMLError_NotFound

    def __init__(self, gpus: dict[str, tuple[int | None, int]]):
        self.gpus = gpus

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid not in self.gpus:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return uuid

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> SimpleNamespace:
        if self.gpus[handle][0] is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return SimpleNamespace(gpu=self.gpus[handle][0])

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:
        return SimpleNamespace(used=self.gpus[handle][1])


def test_the_functions_exist_in_the_real_package():
    for name in vars(Nvml):
        if name.startswith("nvml"):
            assert callable(getattr(pynvml, name))


@pytest.mark.parametrize("function", ["cuDeviceGetUuid", "cuDeviceGetUuid_v2"])
def test_uuids_in_the_order_of_cuda(driver, function):
    assert gpu.uuids([0, 1], driver(function)) == UUIDS


def test_a_driver_that_fails_is_not_there_or_lacks_a_function(driver):
    for indices, library, reason in (
        ([0], driver(fails=999), "cuInit .*error 999"),
        ([2], driver(), "cuDeviceGet .*error 101"),
        ([0], "libno_such.so.1", "cannot be asked.*no_such"),
        ([0], driver("cuDeviceGetName"), "cuDeviceGetUuid"),
    ):
        with pytest.raises(gpu.GpusUnknown, match=reason):
            gpu.uuids(indices, library)


def test_the_mean_and_the_sum_of_several_gpus():
    one, two = UUIDS
    nvml = Nvml({f"GPU-{one}": (90, 300 << 20), f"MIG-{two}": (40, 200 << 20), "GPU-other": (0, 0)})
    assert gpu.Devices(UUIDS, nvml).use() == GpuUse(0.65, 500.0)
    silent = Nvml({f"GPU-{each}": (None, 1 << 20) for each in UUIDS})  # it does not tell how busy it is
    assert gpu.Devices(UUIDS, silent).use() == GpuUse(None, 2.0)
    with pytest.raises(gpu.GpusUnknown, match="Not Found"):
        gpu.Devices(UUIDS, Nvml({}))


def test_without_gpus_nothing_is_sampled():
    assert gpu.sampler(["cpu", "cpu"]) is None


def test_without_a_driver_the_reason_is_given():
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has GPUs")
    with pytest.raises(gpu.GpusUnknown):
        gpu.sampler(["gpu:0"])


def test_samples_are_averaged_from_call_to_call():
    uses = [GpuUse(0.2, 10.0), GpuUse(None, 20.0), GpuUse(0.6, 30.0)]
    read: list[GpuUse] = []

    def take() -> GpuUse:
        read.append(uses[len(read)] if len(read) < len(uses) else GpuUse(1.0, 40.0))
        return read[-1]

    assert gpu.Sampler(lambda: GpuUse(0.5, 1.0), 3600).take() == GpuUse(0.5, 1.0), "before any sample"
    sampler = gpu.Sampler(take, 0.001)
    wait_for(lambda: len(read) > 3, "three samples and the next")
    found = sampler.take()
    assert 0.4 <= found.busy <= 1.0 and found.memory in (30.0, 40.0)
    wait_for(lambda: len(read) > 10, "more samples")
    sampler.take()
    wait_for(lambda: len(read) > 20, "more samples")
    assert sampler.take() == GpuUse(1.0, 40.0)
