"""Networks of the table: the usual ones, and those that a list of chosen ones leaves out, so that tests take in new
ones by themselves.

Networks that are compared with MXNet's own graphs (mxnet_graphs.py) are not among them.
"""

from collections.abc import Collection

from dmltrain import models
from dmltrain.base.errors import UserError
from dmltrain.layers import Network
from tests.models.changed import without_dropout
from tests.models.mxnet_graphs import HELD

SLOW = {"caffe-alexnet", "caffe-googlenet", "keras-resnet"}  # seconds for a batch, even of their smallest images
SHAPES = ((3, 28, 28), (3, 64, 64), (3, 224, 224))  # the smallest that a network takes is used


def usual(name: str) -> Network:
    """The network with its usual classes and images."""
    row = models.NETWORKS[name]
    return models.create(name, None, row.num_classes, row.image_shape)


def other_networks(chosen: Collection[str]) -> dict[str, Network]:
    """Name -> network, each with its usual depth, without dropout."""
    return {name: without_dropout(_smallest(name)) for name in models.NETWORKS if name not in {*chosen, *HELD}}


def _smallest(name: str) -> Network:
    for shape in SHAPES[:-1]:
        try:
            return models.create(name, image_shape=shape)
        except UserError:
            continue
    return models.create(name, image_shape=SHAPES[-1])
