"""Which of our networks is which of MXNet's own graphs (fixture `mxnet_networks`: NAME-symbol.json and NAME.json)."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dmltrain import models
from dmltrain.layers import Network


@dataclass(frozen=True)
class Graph:
    """One of MXNet's graphs, and what makes the same network here.

    `pixels` of height and width, and `images` of a batch, are enough to compare the two: the graphs take images of any
    size that leaves something to the last pooling. Where that is not global, `last` is its size for so many pixels.
    """

    file: str
    network: str
    num_layers: int | None = None
    options: dict[str, Any] = field(default_factory=dict)
    pixels: int = 28
    images: int = 4
    last: int = 0
    undone: str = "none"  # pattern of betas that a later batch norm undoes: no ReLU and no padding is in between
    quick: bool = False  # a second or less

    def ours(self, num_classes: int, image_shape: tuple[int, int, int]) -> Network:
        return models.create(self.network, self.num_layers, num_classes, image_shape, **self.options)


GRAPHS = (
    Graph("mlp", "mlp", quick=True),
    Graph("lenet", "lenet", quick=True),
    Graph("lenet-stn", "lenet", options={"add_stn": True}, quick=True),
    Graph("resnet-50", "resnet", 50, pixels=33, images=2),
    Graph("resnet-v1-18", "resnet-v1", 18, pixels=65, images=2),
    Graph("resnet-v1-20-cifar", "resnet-v1", 20, quick=True),
    Graph("resnet-v1-50", "resnet-v1", 50, pixels=33, images=3),
    Graph("resnext-50", "resnext", 50, pixels=33, images=2),
    Graph("alexnet", "alexnet", pixels=67, images=1),
    Graph("googlenet", "googlenet", pixels=64, images=2),
    Graph("inception-bn-28", "inception-bn", quick=True),
    Graph("inception-bn", "inception-bn", pixels=96, images=1, last=3),
    Graph("inception-v3", "inception-v3", pixels=139, images=1, last=3),
    Graph("inception-v4", "inception-v4", pixels=139, images=1, last=3),
    Graph("inception-resnet-v2", "inception-resnet-v2", pixels=107, images=1, undone="batchnorm242_beta"),
    Graph("mobilenet", "mobilenet", pixels=64, images=1, last=2),
    Graph("mobilenetv2", "mobilenetv2", pixels=64, images=2, undone=".*linear-batchnorm_beta"),
    Graph("vgg-16", "vgg", 16, pixels=32, images=1),
    Graph("vgg-11-bn", "vgg", 11, {"batch_norm": True}, pixels=32, images=3),
)
HELD = {graph.network for graph in GRAPHS}


def table(folder: Path, file: str) -> dict[str, Any]:
    """What NAME.json says, with names of a new process."""
    found = json.loads((folder / f"{file}.json").read_text())
    renamed = names_of_a_new_process(found["arguments"])
    return {**found, "arguments": {renamed[name]: tuple(shape) for name, shape in found["arguments"].items()}}


def names_of_a_new_process(names: Iterable[str]) -> dict[str, str]:
    """Name -> name. Where MXNet's file does not name a layer, MXNet counts the layers of the whole process, and these
    graphs were made in one: fullyconnected3_weight -> fullyconnected0_weight."""
    numbers: dict[str, dict[str, int]] = {}

    def renamed(name: str) -> str:
        made = re.fullmatch(r"(convolution|fullyconnected|batchnorm)(\d+)(_\w+)", name)
        if not made:
            return name
        kind, number, array = made.groups()
        known = numbers.setdefault(kind, {})
        return f"{kind}{known.setdefault(number, len(known))}{array}"

    return {name: renamed(name) for name in names}
