"""torch's devices, by their names in the options: 'cpu', 'gpu:0'.

GPUs are those of torch's accelerator: NVIDIA's and AMD's, which torch both calls cuda, or Intel's (xpu). No other
module knows these names.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
from typing import Any

import torch

from dmltrain.backends.backend import Settings
from dmltrain.backends.device import gpu_index
from dmltrain.base import env

CUBLAS = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # with which cuBLAS computes the same again
_claims: dict[str, socket.socket] = {}  # of GPUs that this process uses


def count() -> int:
    """How many GPUs torch can use here."""
    return torch.cuda.device_count() or (torch.accelerator.device_count() if torch.accelerator.is_available() else 0)


def find(name: str) -> torch.device:
    """'cpu' or 'gpu:0' -> the device. Raises UserError if this machine has no such GPU."""
    if name == "cpu":
        return torch.device("cpu")
    index = gpu_index(name, count(), f"PyTorch {torch.__version__}")
    accelerator = None if torch.cuda.device_count() else torch.accelerator.current_accelerator()
    return torch.device("cuda" if accelerator is None else accelerator.type, index)


def kind(device: torch.device) -> str:
    """'cpu' or 'gpu', as in `optimizers.Torch.fused`."""
    return "cpu" if device.type == "cpu" else "gpu"


def gpus(devices: Sequence[torch.device]) -> list[torch.device]:
    return [device for device in devices if kind(device) == "gpu"]


def wait(device: torch.device) -> None:
    """Until the device has computed what was asked for."""
    if kind(device) == "gpu":
        _module(device).synchronize(device)


def memory(devices: Sequence[torch.device]) -> float | None:
    """The most MiB that were allocated on the GPUs among `devices`; None without one."""
    used = [_module(device).max_memory_allocated(device) for device in gpus(devices)]
    return sum(used) / 2**20 if used else None


def names(devices: Sequence[torch.device]) -> list[str]:
    """The names of the GPUs' models, each once."""
    return sorted({_module(device).get_device_name(device) for device in gpus(devices)})


def driver() -> Any:
    """The functions of CUDA's or ROCm's runtime; None where torch has neither."""
    try:
        return torch.cuda.cudart() if torch.cuda.is_available() else None
    except (AttributeError, RuntimeError, AssertionError):
        return None


def forget_error() -> None:
    """After a function of `driver` has failed. torch leaves its error with the driver, and the next kernel's launch
    raises it: let it be a kernel for which nobody waits."""
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device=torch.cuda.current_device())


def _module(device: torch.device) -> Any:
    return torch.get_device_module(device)


# -- arithmetic -------------------------------------------------------------------------------------------------------


def set_arithmetic(devices: Sequence[torch.device], settings: Settings) -> str:
    """Set what `settings` say of GPUs' arithmetic, for this process. Returns a line for the log; '' without GPUs."""
    own = gpus(devices)
    if not own:
        return ""
    deterministic = settings.repeatable
    tf32 = False if deterministic and settings.tf32 is None else settings.tf32
    libraries = _libraries(own[0])
    for library in libraries if tf32 is not None else ():
        library.allow_tf32 = tf32
    torch.backends.cudnn.deterministic = deterministic
    if deterministic:
        env.set_default(*CUBLAS)
        torch.backends.cudnn.benchmark = False
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # it costs time
    # Where an operator has no such version, torch warns, and names it.
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    shown = {False: "off", True: "on"}
    products, convolutions = (shown[library.allow_tf32] for library in libraries)
    return (
        f"GPU arithmetic: TF32 {products} for products and {convolutions} for convolutions, "
        f"deterministic {shown[deterministic]}"
    )


def _libraries(device: torch.device) -> tuple[Any, Any]:
    """What computes products and convolutions on this GPU; Intel's have oneDNN for both."""
    if device.type == "xpu":
        return torch.backends.mkldnn, torch.backends.mkldnn
    return torch.backends.cuda.matmul, torch.backends.cudnn


# -- sharing ----------------------------------------------------------------------------------------------------------


def shared(devices: Sequence[torch.device]) -> list[torch.device]:
    """The GPUs that another process of dmltrain on this host uses, too. From now on this one does."""
    return [device for device in gpus(devices) if not _claim(_identity(device))]


def _identity(device: torch.device) -> str:
    return str(getattr(_module(device).get_device_properties(device), "uuid", device))


def _claim(identity: str) -> bool:
    """Whether no other process on this host has claimed this GPU. The kernel forgets a claim when its process ends."""
    if identity in _claims:
        return True
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0dmltrain-gpu-{identity}")  # not a file
    except OSError:
        claim.close()
        return False
    _claims[identity] = claim
    return True
