"""The networks, each a value that all backends share: `create(name, ...)` looks up the name in the table `NETWORKS`.

As in MXNet's scripts, case does not matter and `_` means `-` (`inception_bn_28_small`).
"""

from __future__ import annotations

from collections.abc import Callable

from dmltrain.errors import UserError
from dmltrain.layers import Network, ShapeError
from dmltrain.models import inception_bn_28_small, lenet, mlp, resnet

# (num_layers or None for the usual depth, num_classes, image_shape) -> Network
Builder = Callable[[int | None, int, tuple[int, int, int]], Network]

NETWORKS: dict[str, Builder] = {
    "mlp": mlp.build,
    "lenet": lenet.build,
    "resnet": resnet.build,
    "inception-bn-28-small": inception_bn_28_small.build,
}


def create(
    name: str, num_layers: int | None = None, num_classes: int = 10, image_shape: tuple[int, int, int] = (3, 28, 28)
) -> Network:
    """The network of that name for images of `image_shape` (channels, height, width).

    `num_layers` selects the depth of a network with several depths. Raises UserError for an unknown network, an invalid
    depth, or an image shape that does not fit the network.
    """
    key = name.strip().lower().replace("_", "-")
    if key not in NETWORKS:
        raise UserError(f"unknown network {name!r}; known networks: {', '.join(sorted(NETWORKS))}")
    if num_classes < 1 or min(image_shape) < 1:
        found = f"{num_classes} classes, images {image_shape}"
        raise UserError(f"network {key} needs at least one class and images of positive size, found {found}")
    try:
        return NETWORKS[key](num_layers, num_classes, image_shape)
    except ShapeError as problem:
        size = "x".join(map(str, image_shape))
        raise UserError(f"network {key} cannot take images of {size} (channels x height x width): {problem}") from None
