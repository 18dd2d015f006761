"""The options of the group Devices."""

from __future__ import annotations

from dataclasses import dataclass

from dmltrain.options.field import Group, option
from dmltrain.options.values import device_list, gpu_list, switch


@dataclass(frozen=True)
class DeviceOptions(Group):
    """See `Options`."""

    gpus: tuple[str, ...] = option(
        "Devices", "GPUs to use, for example 0 or 0,2,5 (default: the CPU)", gpu_list, (), metavar="I,I"
    )
    devices: tuple[str, ...] = option(
        "Devices",
        "devices to use instead of --gpus: cpu, cpu:COUNT, gpu:COUNT, or auto: the GPU of this worker's number on its "
        "host (LOCAL_RANK), the CPU where there is none",
        device_list,
        (),
    )
    deterministic: bool | None = option(
        "Devices",
        "1: the same run on the same GPU gives the same bits, with slower operators and without TF32 (default: 1 with "
        "--audit or --replay, else 0)",
        switch,
        nargs="?",
        const=True,
    )
    tf32: bool | None = option(
        "Devices",
        "1: GPUs compute float32 products and convolutions in TF32, with 10 bits of precision; 0: neither (default: "
        "PyTorch's, convolutions only; 0 with --deterministic 1)",
        switch,
        nargs="?",
        const=True,
    )
