"""The networks of the table that a list of chosen ones leaves out, so that tests take in new ones by themselves."""

from collections.abc import Collection

from dmltrain import models
from dmltrain.errors import UserError
from dmltrain.layers import Network

SHAPES = ((3, 28, 28), (3, 64, 64), (3, 224, 224))  # the smallest that a network takes is used


def other_networks(chosen: Collection[str]) -> dict[str, Network]:
    """Name -> network, each with its usual depth."""
    return {name: _smallest(name) for name in models.NETWORKS if name not in chosen}


def _smallest(name: str) -> Network:
    for shape in SHAPES[:-1]:
        try:
            return models.create(name, image_shape=shape)
        except UserError:
            continue
    return models.create(name, image_shape=SHAPES[-1])
