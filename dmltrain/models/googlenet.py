"""GoogLeNet without its auxiliary classifiers, as MXNet builds it
(example/image-classification/symbols/googlenet.py), after Szegedy et al., "Going Deeper with Convolutions", 2014.

Besides the auxiliary classifiers, MXNet leaves out the local response normalisation and the dropout of the paper. The
last pooling is global, so images need not be 224 pixels high.
"""

from __future__ import annotations

from dmltrain.layers import Chain, Concat, Conv, Dense, Flatten, GlobalAvgPool, MaxPool, Network, Relu, chain, concat
from dmltrain.models.architecture import Architecture

# name, then channels: 1x1; 3x3 after a reduction; 5x5 after a reduction; projection of the pooling
STAGES = (
    (("in3a", 64, 96, 128, 16, 32, 32), ("in3b", 128, 128, 192, 32, 96, 64)),
    (
        ("in4a", 192, 96, 208, 16, 48, 64),
        ("in4b", 160, 112, 224, 24, 64, 64),
        ("in4c", 128, 128, 256, 24, 64, 64),
        ("in4d", 112, 144, 288, 32, 64, 64),
        ("in4e", 256, 160, 320, 32, 128, 128),
    ),
    (("in5a", 256, 160, 320, 32, 128, 128), ("in5b", 384, 192, 384, 48, 128, 128)),
)


def build(num_layers: int | None, num_classes: int, image_shape: tuple[int, int, int]) -> Network:
    stages = [chain(MaxPool(kernel=3, stride=2), *(_inception(*block) for block in stage)) for stage in STAGES]
    root = chain(
        _unit("conv1", 64, kernel=7, stride=2),
        MaxPool(kernel=3, stride=2),
        _unit("conv2", 64),
        _unit("conv3", 192, kernel=3),
        *stages,
        GlobalAvgPool(),
        Flatten(),
        Dense("fullyconnected0", num_classes),
    )
    return Network("googlenet", root, image_shape, num_classes)


def _unit(name: str, channels: int, kernel: int = 1, stride: int = 1) -> Chain:
    """Convolution and ReLU; stride 1 keeps height and width."""
    return chain(Conv(f"conv_{name}", channels, kernel=kernel, stride=stride, pad=kernel // 2), Relu(f"relu_{name}"))


def _inception(name: str, one: int, three_in: int, three: int, five_in: int, five: int, projection: int) -> Concat:
    return concat(
        _unit(f"{name}_1x1", one),
        chain(_unit(f"{name}_3x3_reduce", three_in), _unit(f"{name}_3x3", three, kernel=3)),
        chain(_unit(f"{name}_5x5_reduce", five_in), _unit(f"{name}_5x5", five, kernel=5)),
        chain(MaxPool(kernel=3, stride=1, pad=1), _unit(f"{name}_proj", projection)),
    )


ARCHITECTURE = Architecture(build, image_shape=(3, 224, 224), num_classes=1000)
