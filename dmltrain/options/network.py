"""The options of the group Network."""

from __future__ import annotations

from dataclasses import dataclass

from dmltrain import models
from dmltrain.backends.table import BACKENDS
from dmltrain.options.field import option
from dmltrain.options.values import integer, network_name, one_of

DTYPES = tuple(dict.fromkeys(dtype for each in BACKENDS.values() for dtype in each.capabilities.dtypes))


@dataclass(frozen=True)
class NetworkOptions:
    """See `Options`."""

    network: str = option("Network", "the network to train: " + ", ".join(models.NETWORKS), network_name, "mlp")
    num_layers: int | None = option(
        "Network", "number of layers, for networks with several depths (resnet)", integer(1)
    )
    dtype: str = option(
        "Network",
        "data type of the computation; weights stay float32: " + ", ".join(DTYPES),
        one_of("dtype", DTYPES),
        "float32",
    )
    memory_format: str = option(
        "Network",
        "memory layout of images with torch: channels_last or contiguous",
        one_of("memory format", ("channels_last", "contiguous")),
        "channels_last",
    )
    compile: int = option("Network", "1: compile the network with torch.compile", integer(0), 0, nargs="?", const=1)
    backend: str = option(
        "Network",
        "the deep-learning framework to use: " + ", ".join(BACKENDS),
        one_of("backend", BACKENDS),
        "torch",
    )
