"""Networks with other layers in place of some, so that two runs can be compared."""

from collections.abc import Callable
from dataclasses import fields, replace

from dmltrain.layers import AvgPool, Chain, Conv, Dense, Dropout, Layer, LocalResponseNorm, Network

LAST_POOLINGS = ("global_pool", "global_avgpool")  # those of a fixed size, in MXNet's graphs as in our networks


def without_dropout(network: Network) -> Network:
    """The same network with dropout of rate 0."""
    return _changed(network, lambda layer: replace(layer, rate=0.0) if isinstance(layer, Dropout) else layer)


def without_response_norm(network: Network) -> Network:
    """The same network with the identity for local response normalisation."""
    return _changed(network, lambda layer: Chain() if isinstance(layer, LocalResponseNorm) else layer)


def narrow(size: int) -> int:
    """A quarter of so many channels, groups or features; all of them if they are no multiple of 16, as classes are."""
    return size if size % 16 else size // 4


def narrowed(network: Network) -> Network:
    """The same network with a quarter of its channels, groups and features: a sixteenth of the weights."""

    def change(layer: Layer) -> Layer:
        if isinstance(layer, Conv):
            return replace(layer, channels=narrow(layer.channels), groups=narrow(layer.groups))
        return replace(layer, features=narrow(layer.features)) if isinstance(layer, Dense) else layer

    return _changed(network, change)


def with_last_pooling(network: Network, pixels: int, size: int) -> Network:
    """The same network for images of fewer pixels, of which so few reach its last pooling."""

    def change(layer: Layer) -> Layer:
        is_last = isinstance(layer, AvgPool) and layer.name in LAST_POOLINGS
        return replace(layer, kernel=(size, size)) if is_last else layer

    return replace(network, root=_changed(network, change).root, input_shape=(3, pixels, pixels))


def _changed(network: Network, change: Callable[[Layer], Layer]) -> Network:
    def below(value: object) -> object:
        if isinstance(value, tuple):
            return tuple(map(below, value))
        if not isinstance(value, Layer):
            return value
        found = {field.name: getattr(value, field.name) for field in fields(value)}
        return change(replace(value, **{name: below(each) for name, each in found.items()}))

    return replace(network, root=below(network.root))
