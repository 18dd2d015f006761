"""A CUDA device that is none: tests of the GPU path run on it, in a PyTorch for CPUs, in every process that calls
`install` before it imports torch.

Device memory is of its own, and the host cannot touch it. Copies are as asynchronous as CUDA allows, and whatever
streams, events and waits leave without an order is a race, which `check` raises (source/order.h, operators.cpp). It has
neither CUDA's numerics nor its speed: results are the CPU's, bit for bit. It is compiled once, for one version of
torch, into ~/.cache/dmltrain/fake_cuda.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

SOURCE = Path(__file__).with_name("source")
TORCH = "2.13.0"  # whose internals it uses
COMPILER = os.environ.get("CXX", "g++")
FLAGS = ("-O1", "-std=c++20", "-fPIC", "-shared", "-w")
DEVICES = 2  # as in source/device.h


class NotHere(Exception):
    """It cannot be built; the message says why."""


@functools.cache
def library() -> Path:
    """The compiled library, which this takes half a minute to build where it is not in the cache. Raises NotHere;
    RuntimeError if a compiler is here, but refuses the source."""
    if (_torch() / "lib" / "libtorch_cuda.so").exists():
        raise NotHere("the fake CUDA device needs a build of torch for CPUs, and this one has CUDA")
    version = importlib.metadata.version("torch").partition("+")[0]
    if version != TORCH:
        raise NotHere(f"the fake CUDA device is written for torch {TORCH}, not {version}")
    if shutil.which(COMPILER) is None:
        raise NotHere(f"the fake CUDA device needs a C++ compiler: {COMPILER} is missing")
    files = sorted(SOURCE.iterdir())
    content = b"\0".join([repr((TORCH, COMPILER, FLAGS)).encode(), *(file.read_bytes() for file in files)])
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "dmltrain", "fake_cuda")
    built = cache / f"{hashlib.sha256(content).hexdigest()[:16]}.so"
    if not built.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with open(cache / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # tests side by side build it once
            if not built.exists():
                _build(built)
    return built


def _build(built: Path) -> None:
    include, new = _torch() / "include", built.with_suffix(".new")
    words = [f"-I{include}", f"-I{include}/torch/csrc/api/include", f"-L{_torch()}/lib", "-ltorch_cpu", "-lc10"]
    command = [COMPILER, *FLAGS, str(SOURCE / "operators.cpp"), *words, "-o", str(new)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the fake CUDA device cannot be compiled: {done.stderr[-500:]}")
    new.replace(built)


def _torch() -> Path:
    spec = importlib.util.find_spec("torch")  # imports nothing
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


@functools.cache
def _loaded() -> ctypes.CDLL:
    assert "torch" not in sys.modules, "torch asks for a CUDA device once, when it is imported"
    for name in ("libc10.so", "libtorch_cpu.so"):  # by their place: the library was built in any environment
        ctypes.CDLL(str(_torch() / "lib" / name), ctypes.RTLD_GLOBAL)
    loaded = ctypes.CDLL(str(library()))
    loaded.fake_cuda_take_races.restype = ctypes.c_char_p
    loaded.fake_cuda_count.restype = ctypes.c_long
    loaded.fake_cuda_register.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]
    loaded.fake_cuda_unregister.argtypes = [ctypes.c_void_p]
    return loaded


def install() -> None:
    """Make torch see the device, and import torch. Raises NotHere."""
    _loaded()
    import torch

    cuda, accelerator = torch.cuda, torch.accelerator
    cuda._initialized = True
    cuda.is_available = lambda: True
    cuda.device_count = lambda: DEVICES
    cuda.current_device = accelerator.current_device_index
    cuda.is_bf16_supported = lambda including_emulation=True: True
    cuda.get_device_name = lambda device=None: "Fake CUDA"
    cuda.get_device_capability = lambda device=None: (9, 0)
    cuda.get_device_properties = lambda device=None: SimpleNamespace(name="Fake CUDA", uuid=f"fake-{_index(device)}")
    cuda.synchronize = lambda device=None: _loaded().fake_cuda_synchronize(_index(device))
    cuda.memory_allocated = lambda device=None: counted("device bytes")
    cuda.max_memory_allocated = lambda device=None: counted("most device bytes")
    cuda.reset_peak_memory_stats = cuda.empty_cache = lambda device=None: None
    cuda.cudart = lambda: SimpleNamespace(
        cudaHostRegister=_loaded().fake_cuda_register, cudaHostUnregister=_loaded().fake_cuda_unregister
    )
    cuda.default_generators = tuple(torch.Generator() for _ in range(DEVICES))
    cuda.current_stream = accelerator.current_stream
    cuda.Stream = _type(lambda device="cuda", priority=0: torch.Stream(device=device))
    cuda.Event = _type(lambda enable_timing=False, blocking=False, interprocess=False: torch.Event(device="cuda"))
    cuda.stream = lambda stream: stream  # torch.Stream is a context itself
    torch._C._cuda_getCurrentRawStream = lambda device: 0


def _type(make: Callable[..., object]) -> type:
    """A type, as torch expects one in these places, that makes another one's objects."""
    return type("OfAnyDevice", (), {"__new__": lambda _, *arguments, **options: make(*arguments, **options)})


def _index(device: object) -> int:
    import torch

    if device is None or isinstance(device, int):
        return torch.accelerator.current_device_index() if device is None else device
    index = torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


def counted(what: str) -> int:
    """What has happened in this process so far: `kernels`, `synchronisations`, `copies to the host`, `blocking copies
    to the host` and `bytes to the host`, the same `to the device`; `copies on other streams` than the first; `device
    bytes`, and the `most` of them."""
    return _loaded().fake_cuda_count(what.encode())


def fail(error: int) -> int:
    """What a function of CUDA's runtime returns that fails; the next kernel of this thread raises the error."""
    return _loaded().fake_cuda_fail(error)


def take_races() -> list[str]:
    """The races since the last call, up to what the devices have been asked for so far."""
    for index in range(DEVICES):
        _loaded().fake_cuda_synchronize(index)
    return _loaded().fake_cuda_take_races().decode().splitlines()


def check() -> None:
    """Raises AssertionError if there was a race since the last call."""
    races = take_races()
    assert not races, "\n".join(races)


def run(path: str, run_name: str) -> None:
    """runpy.run_path of a program; a race in it is an AssertionError at its end."""
    try:
        runpy.run_path(path, run_name=run_name)
    finally:
        check()
