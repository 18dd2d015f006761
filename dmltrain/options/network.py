"""The options of the group Network."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dmltrain import models
from dmltrain.backends.table import BACKENDS
from dmltrain.options.field import Group, option
from dmltrain.options.values import integer, network_name, number, one_of, switch

DEEP = [name for name, row in models.NETWORKS.items() if row.depths]  # networks with several depths
OWN = "Options of some networks"
DTYPES = tuple(dict.fromkeys(dtype for backend in BACKENDS.values() for dtype in backend.capabilities.dtypes))


def own(name: str, text: str, parse: Callable[[str], Any], **more: Any) -> Any:
    """A field for `name`, an option that some networks have: a keyword-only argument of their builders. None, the
    default of the field, leaves the choice to the network."""
    return option(OWN, f"{text} ({', '.join(models.networks_with(name))})", parse, **more)


@dataclass(frozen=True)
class NetworkOptions(Group):
    """See `Options`."""

    equal_on_members = True

    network: str = option(
        "Network",
        f"the network to train: {', '.join(models.NETWORKS)}; or PREFIX-symbol.json, a graph that MXNet wrote",
        network_name,
        "mlp",
    )
    num_layers: int | None = option(
        "Network", "number of layers, for networks with several depths: " + ", ".join(DEEP), integer(1)
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
        "Network", "the deep-learning framework to use: " + ", ".join(BACKENDS), one_of("backend", BACKENDS), "torch"
    )
    batch_norm: bool | None = own("batch_norm", "1: a batch norm after each convolution", switch, nargs="?", const=True)
    add_stn: bool | None = own("add_stn", "1: a spatial transformer first", switch, nargs="?", const=True)
    multiplier: float | None = own("multiplier", "factor of the numbers of channels", number(0.0, above=True))
    num_group: int | None = own("num_group", "groups of the 3x3 convolutions", integer(1))
    zero_gamma: bool | None = own("zero_gamma", "1: each residual unit starts as 0", switch, nargs="?", const=True)
    squeeze_excitation: bool | None = own(
        "squeeze_excitation", "1: squeeze-and-excitation in each unit", switch, nargs="?", const=True
    )
    stochastic_depth: float | None = own("stochastic_depth", "probability to skip the last residual unit", number(0.0))
    blur_pool: bool | None = own(
        "blur_pool", "1: blur before convolutions with a stride", switch, nargs="?", const=True
    )

    @property
    def network_options(self) -> dict[str, Any]:
        """The options of the network itself that were given."""
        names = [field.name for field in dataclasses.fields(NetworkOptions) if field.metadata["group"] == OWN]
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}
