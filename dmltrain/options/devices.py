"""The options of the group Devices."""

from __future__ import annotations

from dataclasses import dataclass

from dmltrain.options.field import Group, option
from dmltrain.options.values import device_list, gpu_list


@dataclass(frozen=True)
class DeviceOptions(Group):
    """See `Options`."""

    gpus: tuple[str, ...] = option(
        "Devices", "GPUs to use, for example 0 or 0,2,5 (default: the CPU)", gpu_list, (), metavar="I,I"
    )
    devices: tuple[str, ...] = option(
        "Devices", "devices to use instead of --gpus: cpu, cpu:COUNT or gpu:COUNT", device_list, ()
    )
