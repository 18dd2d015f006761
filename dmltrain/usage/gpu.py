"""This worker's GPUs, sampled by a thread: through NVIDIA's management library (the package nvidia-ml-py), or from the
files of AMD's driver.

The frameworks number GPUs as CUDA does, after CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER; NVML knows neither. So the
CUDA driver gives the UUID of each device, by which NVML finds it. AMD's runtime gives the address on the PCI bus.
"""

from __future__ import annotations

import ctypes
import threading
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dmltrain.usage import MIB, GpuUse

SAMPLE_SECONDS = 1.0  # about the period over which NVML averages
DRIVER = "libcuda.so.1"
AMD_DRIVER, AMD_RUNTIME = Path("/sys/module/amdgpu"), "libamdhip64.so"  # which torch has loaded
PCI_DEVICES = Path("/sys/bus/pci/devices")


class GpusUnknown(Exception):
    """The GPUs cannot be sampled; the message says why."""


def sampler(names: Sequence[str]) -> Sampler | None:
    """A running sampler of the GPUs among `names` ('gpu:0'); None without GPUs. Raises GpusUnknown."""
    indices = [int(name.removeprefix("gpu:")) for name in names if name.startswith("gpu:")]
    if not indices:
        return None
    if AMD_DRIVER.exists() and not Path("/proc/driver/nvidia").exists():
        return Sampler(AmdDevices(addresses(indices)).use)
    try:
        import pynvml
    except ImportError:
        raise GpusUnknown("the package nvidia-ml-py is not installed (pip install 'dmltrain[gpu]')") from None
    return Sampler(Devices(uuids(indices), pynvml).use)


class Devices:
    """`nvml` is the module pynvml."""

    def __init__(self, uuids: Sequence[str], nvml: Any):
        self._nvml = nvml
        try:
            nvml.nvmlInit()
            self._handles = [self._handle(uuid) for uuid in uuids]
        except nvml.NVMLError as error:
            raise GpusUnknown(f"NVIDIA's management library says: {error}") from None

    def _handle(self, uuid: str) -> Any:
        try:
            return self._nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        except self._nvml.NVMLError:
            return self._nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")  # a part of a GPU

    def use(self) -> GpuUse:
        """What the driver tells now: the mean of the last moments, and the memory."""
        nvml = self._nvml
        busy = self._each(lambda handle: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)
        memory = self._each(lambda handle: nvml.nvmlDeviceGetMemoryInfo(handle).used / MIB)
        return GpuUse(sum(busy) / len(busy) if busy else None, sum(memory) if memory else None)

    def _each(self, read: Callable[[Any], float]) -> list[float]:
        """The values of all GPUs; [] if one GPU has no value: a part of a GPU (MIG) has no utilisation."""
        try:
            return [read(handle) for handle in self._handles]
        except self._nvml.NVMLError:
            return []


class AmdDevices:
    """`addresses` on the PCI bus, of which `folder` has a folder each."""

    def __init__(self, addresses: Sequence[str], folder: Path = PCI_DEVICES):
        self._folders = [folder / address for address in addresses]

    def use(self) -> GpuUse:
        """What the driver tells now."""
        busy, memory = self._each("gpu_busy_percent"), self._each("mem_info_vram_used")
        return GpuUse(sum(busy) / len(busy) / 100 if busy else None, sum(memory) / MIB if memory else None)

    def _each(self, name: str) -> list[float]:
        """The values of all GPUs; [] if one has no value."""
        try:
            return [float((folder / name).read_text()) for folder in self._folders]
        except (OSError, ValueError):
            return []


class Sampler:
    """Calls `read` every `seconds` in a daemon thread."""

    def __init__(self, read: Callable[[], GpuUse], seconds: float = SAMPLE_SECONDS):
        self._read, self._seconds = read, seconds
        self._lock, self._samples = threading.Lock(), list[GpuUse]()
        threading.Thread(target=self._run, name="GPU samples", daemon=True).start()

    def _run(self) -> None:
        pause = threading.Event()
        while not pause.wait(self._seconds):
            use = self._read()
            with self._lock:
                self._samples.append(use)

    def take(self) -> GpuUse:
        """The mean of the samples since the last call, and the last memory. If there is none yet, it is taken now."""
        with self._lock:
            samples, self._samples = self._samples, []
        samples = samples or [self._read()]
        busy = [sample.busy for sample in samples if sample.busy is not None]
        return GpuUse(sum(busy) / len(busy) if busy else None, samples[-1].memory)


def uuids(indices: Sequence[int], library: str = DRIVER) -> list[str]:
    """The UUIDs of CUDA's devices with these numbers. Raises GpusUnknown."""
    try:
        driver = ctypes.CDLL(library)
        _call(driver, "cuInit", 0)
        return [_uuid(driver, index) for index in indices]
    except (OSError, AttributeError) as error:
        raise GpusUnknown(f"the CUDA driver cannot be asked for the GPUs' names: {error}") from None


def addresses(indices: Sequence[int], library: str = AMD_RUNTIME) -> list[str]:
    """The addresses on the PCI bus of AMD's devices with these numbers. Raises GpusUnknown."""
    try:
        runtime, found = ctypes.CDLL(library), []
        for index in indices:
            address = ctypes.create_string_buffer(32)
            _call(runtime, "hipDeviceGetPCIBusId", address, len(address), index)
            found.append(address.value.decode().lower())
        return found
    except (OSError, AttributeError) as error:
        raise GpusUnknown(f"AMD's runtime cannot be asked for the GPUs' places: {error}") from None


def _uuid(driver: Any, index: int) -> str:
    device, identity = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    _call(driver, "cuDeviceGet", ctypes.byref(device), index)
    name = "cuDeviceGetUuid_v2" if hasattr(driver, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"  # v2 knows MIG
    _call(driver, name, ctypes.byref(identity), device)
    return str(uuid.UUID(bytes=bytes(identity)))


def _call(driver: Any, name: str, *arguments: Any) -> None:
    """Call a function of the CUDA driver, https://docs.nvidia.com/cuda/cuda-driver-api, or of AMD's runtime. OSError if
    it fails."""
    if code := getattr(driver, name)(*arguments):
        raise OSError(f"{name} failed with the error {code}")
