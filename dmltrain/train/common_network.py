"""The network that all workers train. If it is in a file, each rebuilds it from its own copy, and all must agree."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from dmltrain import models
from dmltrain.base.errors import UserError
from dmltrain.kvstore import agreement
from dmltrain.kvstore.base import KVStore
from dmltrain.layers import INITIALISERS, Network
from dmltrain.models import graph_file
from dmltrain.options import Options
from dmltrain.train.loading import other_shapes, shape_and_classes


def check(options: Options) -> None:
    """Raise UserError, before any data are read, if there is no network of the options."""
    if options.pretrained_model or graph_file.is_graph(options.network):
        return  # files tell, which only workers need have
    shape, classes = shape_and_classes(options)
    _built(options, classes, shape)


def create(options: Options, num_classes: int | None, image_shape: tuple[int, int, int], store: KVStore) -> Network:
    """The network of the options; `num_classes` None: as many as its graph has, or as usual. Every worker must call
    this. Raises UserError, on all workers if one of them has another graph."""
    network = _built(options, num_classes, image_shape)
    if graph_file.is_graph(options.network):
        check_same(options.network, network, store)
    for given, shape in other_shapes(options).items():
        other = _built(options, num_classes, shape)
        if (other.root, other.parameters()) != (network.root, network.parameters()):
            raise UserError(
                f"{given}: {network.name} has other layers or weights for images of this size: use sizes for which it "
                "is the same, or a network that ends with the mean over all positions, such as resnet"
            )
    initialiser = INITIALISERS[options.initializer]
    return replace(network, initialiser=initialiser) if initialiser else network


def _built(options: Options, num_classes: int | None, image_shape: tuple[int, int, int]) -> Network:
    network = models.create(options.network, options.num_layers, num_classes, image_shape, **options.network_options)
    if options.sync_bn and not network.auxiliary():
        raise UserError(f"--sync-bn: network {network.name} has no batch norm: leave --sync-bn out")
    return network


def check_same(source: str, network: Network, store: KVStore) -> None:
    """Raise UserError on all workers if one of them has another network."""
    digest = hashlib.sha256(repr(network).encode()).hexdigest()  # of all layers, their options and the images' shape
    table = agreement.rows(store, "network", agreement.words(digest))
    others = agreement.different(table)
    if others:
        raise UserError(
            f"--network {source}: {agreement.named(others)} rebuilt another network than worker 0 from this file: look "
            f"at {agreement.suspects(table, others)}, and copy the right file to all hosts"
        )
