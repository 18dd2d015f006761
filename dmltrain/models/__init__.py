"""The networks, each a value that all backends share: `create(name, ...)` looks up the name in the table `NETWORKS`.

As in MXNet's scripts, case does not matter and `_` means `-` (`inception_bn_28_small`). A name that ends with .json is
a file with MXNet's graph of a network.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from dmltrain.base.errors import UserError
from dmltrain.layers import Network, ShapeError
from dmltrain.models import (
    airbench94,
    alexnet,
    caffe_alexnet,
    caffe_cifar10_quick,
    caffe_googlenet,
    convnext_t,
    efficientnet_b0,
    googlenet,
    graph_file,
    inception_bn,
    inception_bn_28_small,
    inception_resnet_v2,
    inception_v3,
    inception_v4,
    keras_mnist,
    keras_resnet,
    lenet,
    mlp,
    mobilenet,
    mobilenetv2,
    resnet,
    resnet_v1,
    resnet_v1b,
    resnet_v1d,
    resnext,
    vgg,
)
from dmltrain.models.architecture import Architecture

NETWORKS: dict[str, Architecture] = {
    "mlp": mlp.ARCHITECTURE,
    "lenet": lenet.ARCHITECTURE,
    "resnet": resnet.ARCHITECTURE,
    "resnet-v1": resnet_v1.ARCHITECTURE,
    "resnet-v1b": resnet_v1b.ARCHITECTURE,
    "resnet-v1d": resnet_v1d.ARCHITECTURE,
    "resnext": resnext.ARCHITECTURE,
    "vgg": vgg.ARCHITECTURE,
    "alexnet": alexnet.ARCHITECTURE,
    "googlenet": googlenet.ARCHITECTURE,
    "inception-bn": inception_bn.ARCHITECTURE,
    "inception-bn-28-small": inception_bn_28_small.ARCHITECTURE,
    "inception-v3": inception_v3.ARCHITECTURE,
    "inception-v4": inception_v4.ARCHITECTURE,
    "inception-resnet-v2": inception_resnet_v2.ARCHITECTURE,
    "mobilenet": mobilenet.ARCHITECTURE,
    "mobilenetv2": mobilenetv2.ARCHITECTURE,
    "efficientnet-b0": efficientnet_b0.ARCHITECTURE,
    "convnext-t": convnext_t.ARCHITECTURE,
    "airbench94": airbench94.ARCHITECTURE,
    "caffe-alexnet": caffe_alexnet.ARCHITECTURE,
    "caffe-cifar10-quick": caffe_cifar10_quick.ARCHITECTURE,
    "caffe-googlenet": caffe_googlenet.ARCHITECTURE,
    "keras-mnist": keras_mnist.ARCHITECTURE,
    "keras-resnet": keras_resnet.ARCHITECTURE,
}


def create(
    name: str,
    num_layers: int | None = None,
    num_classes: int | None = 10,
    image_shape: tuple[int, int, int] = (3, 28, 28),
    **options: Any,
) -> Network:
    """The network of that name for images of `image_shape` (channels, height, width).

    `num_layers` selects the depth of a network with several depths; `num_classes` None means the usual number, or the
    graph's; `options` are the network's own (`batch_norm=True`). Raises UserError for an unknown network, an option
    that the network does not have, an invalid depth or value, or an image shape that does not fit the network.
    """
    if graph_file.is_graph(name):
        _refuse_depth(name, num_layers)
        return graph_file.build(name, num_classes, image_shape, options)
    key = name.strip().lower().replace("_", "-")
    check_options(key, options)
    if num_classes is None:
        num_classes = NETWORKS[key].num_classes
    if num_classes < 1 or min(image_shape) < 1:
        actual = f"{num_classes} classes, images {image_shape}"
        raise UserError(f"network {key} needs at least one class and images of positive size, found {actual}")
    if not NETWORKS[key].depths:
        _refuse_depth(key, num_layers)
    try:
        return NETWORKS[key].build(num_layers, num_classes, image_shape, **options)
    except ShapeError as problem:
        size, usual = ("x".join(map(str, shape)) for shape in (image_shape, NETWORKS[key].image_shape))
        raise UserError(
            f"network {key} cannot take images of {size} (channels x height x width): {problem}; "
            f"its usual images: {usual}"
        ) from None


def _refuse_depth(network: str, num_layers: int | None) -> None:
    """Raise UserError if --num-layers was given for a network with a single depth."""
    if num_layers is not None:
        raise UserError(f"network {network} has a single depth, found --num-layers {num_layers}; leave this option out")


def check_options(key: str, options: Collection[str]) -> None:
    """Raise UserError if there is no network `key`, or if it does not have one of these options."""
    if graph_file.is_graph(key):
        return graph_file.check_options(key, options)
    if key not in NETWORKS:
        raise UserError(f"unknown network {key!r}; known networks: {', '.join(sorted(NETWORKS))}")
    for option in options:
        if option not in NETWORKS[key].options:
            having = ", ".join(networks_with(option))
            hint = f"networks with it: {having}" if having else "no network has it"
            raise UserError(f"network {key} has no option --{option.replace('_', '-')}; {hint}")


def networks_with(option: str) -> list[str]:
    """The networks that have this option of their own."""
    return [key for key, row in NETWORKS.items() if option in row.options]
