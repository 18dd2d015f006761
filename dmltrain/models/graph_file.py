"""A network from a graph that MXNet wrote: --network PREFIX-symbol.json."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from dmltrain.base.errors import UserError
from dmltrain.layers import Network
from dmltrain.mxnet_files import rebuild

SUFFIX = ".json"


def is_graph(name: str) -> bool:
    """Whether this names a file, not a network of the table."""
    return name.endswith(SUFFIX)


def build(name: str, num_classes: int | None, image_shape: tuple[int, int, int], options: Collection[str]) -> Network:
    """Raises UserError for options, which a graph does not have, and for a graph that cannot be rebuilt."""
    check_options(name, options)
    return rebuild.read(Path(name), num_classes, image_shape).network


def check_options(name: str, options: Collection[str]) -> None:
    for option in options:
        raise UserError(f"network {name} is a graph in a file, which has no option --{option.replace('_', '-')}")


def names_in_files(name: str, network: Network) -> dict[str, str]:
    """The names of the network's arrays in MXNet's files, by its own names; those that are missing have the same."""
    if not is_graph(name):
        return {}
    return rebuild.read(Path(name), None, network.input_shape).names
