"""Residual networks with grouped convolutions, as MXNet builds them
(example/image-classification/symbols/resnext.py), after Xie, Girshick, Dollar, Tu and He, "Aggregated Residual
Transformations for Deep Neural Networks", 2016.

`num_group` is the number of groups of the 3x3 convolutions (the paper's cardinality), 32 as in MXNet. Shallow networks,
whose units have two convolutions, have no grouped ones. As in MXNet, a batch norm with fixed scale comes first, and the
first unit of every stage has a 1x1 convolution with batch norm on its shortcut even if the shapes agree. Depths and
sizes: residual.py.
"""

from __future__ import annotations

from dmltrain.base.errors import UserError
from dmltrain.layers import BatchNorm, Dense, Flatten, GlobalAvgPool, Layer, Network, Relu, add, chain
from dmltrain.models.architecture import Architecture
from dmltrain.models.residual import DEPTHS, ResidualPlan, conv, imagenet_stem, norm, normed, plan

GROUPS = 32


def build(
    num_layers: int | None,
    num_classes: int,
    image_shape: tuple[int, int, int],
    *,
    num_group: int | None = None,
    zero_gamma: bool = False,
) -> Network:
    """Raises UserError for invalid depths and groups."""
    shape = plan("resnext", num_layers, image_shape)
    groups = GROUPS if num_group is None else num_group
    if num_group is not None:
        _check_groups(shape, num_group)

    def unit(name: str, channels: int, stride: int, first: bool) -> Layer:
        inner = channels // 2
        deep, basic = ((inner, 1), (inner, 3, stride, groups), (channels, 1)), ((channels, 3, stride), (channels, 3))
        body = normed(name, *(deep if shape.bottleneck else basic), zero_gamma=zero_gamma)
        projection = (conv(f"{name}_sc", channels, 1, stride), norm(f"{name}_sc_bn")) if first else ()
        return chain(add(body, chain(*projection)), Relu(f"{name}_relu"))

    stem = conv("conv0", shape.channels[0], 3) if shape.small else imagenet_stem(shape.channels[0])
    head = (GlobalAvgPool("pool1"), Flatten(), Dense("fc1", num_classes))
    root = chain(BatchNorm("bn_data", epsilon=2e-5, fixed_scale=True), stem, *shape.stages(unit), *head)
    name = f"resnext-{shape.depth}" + (f"-groups-{groups}" if groups != GROUPS else "")
    return Network(name, root, image_shape, num_classes)


def _check_groups(shape: ResidualPlan, num_group: int) -> None:
    if not shape.bottleneck:
        deep = "at least 164" if shape.small else "50, 101, 152, 200 or 269"
        fix = f"leave --num-group out, or use a depth of {deep}"
        raise UserError(
            f"resnext of {shape.depth} layers has no grouped convolutions, found num_group {num_group}; {fix}"
        )
    narrowest = shape.channels[1] // 2
    if num_group < 1 or narrowest % num_group:
        raise UserError(
            f"resnext of {shape.depth} layers: --num-group must divide the {narrowest} channels of its narrowest 3x3 "
            f"convolutions, is {num_group}"
        )


ARCHITECTURE = Architecture(build, image_shape=(3, 224, 224), num_classes=1000, depths=DEPTHS)
