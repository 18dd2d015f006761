"""This worker's GPUs, sampled by a thread through NVIDIA's management library (the package nvidia-ml-py).

The frameworks number GPUs as CUDA does, after CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER; NVML knows neither. So the
CUDA driver gives the UUID of each device, by which NVML finds it.
"""

from __future__ import annotations

import ctypes
import threading
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from dmltrain.usage import MIB, GpuUse

SAMPLE_SECONDS = 1.0  # about the period over which NVML averages
DRIVER = "libcuda.so.1"


class GpusUnknown(Exception):
    """The GPUs cannot be sampled; the message says why."""


def sampler(names: Sequence[str]) -> Sampler | None:
    """A running sampler of the GPUs among `names` ('gpu:0'); None without GPUs. Raises GpusUnknown."""
    indices = [int(name.removeprefix("gpu:")) for name in names if name.startswith("gpu:")]
    if not indices:
        return None
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


def _uuid(driver: Any, index: int) -> str:
    device, identity = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    _call(driver, "cuDeviceGet", ctypes.byref(device), index)
    name = "cuDeviceGetUuid_v2" if hasattr(driver, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"  # v2 knows MIG
    _call(driver, name, ctypes.byref(identity), device)
    return str(uuid.UUID(bytes=bytes(identity)))


def _call(driver: Any, name: str, *arguments: Any) -> None:
    """Call a function of the CUDA driver, https://docs.nvidia.com/cuda/cuda-driver-api. OSError if it fails."""
    if code := getattr(driver, name)(*arguments):
        raise OSError(f"{name} failed with the error {code}")
