"""Fine-tuning: a network with a new last layer, whose other weights come from a checkpoint.

MXNet's example/image-classification/fine-tune.py (`get_fine_tune_model`) does this with --pretrained-model and
--layer-before-fullc. Caffe gives the new layer a larger learning rate (examples/finetune_flickr_style: 10 times).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from logging import Logger

from dmltrain import initial
from dmltrain.base.arrays import Array
from dmltrain.base.errors import UserError
from dmltrain.checkpoints import pretrained_weights
from dmltrain.checkpoints.pretrained_weights import Trained
from dmltrain.kvstore.base import KVStore
from dmltrain.layers import Auxiliary, Dense, Flatten, Layer, Network, chain
from dmltrain.models import graph_file
from dmltrain.options import Options

NEW_LAYER = "fc"  # MXNet's name for it
NAMED = 4  # arrays at most in a message


@dataclass(frozen=True)
class FineTuned:
    """A network for other classes than it was trained for.

    new: the names of the arrays of the last layer, and of the last layers of auxiliary classifiers.
    """

    network: Network
    new: frozenset[str]


def build(options: Options, network: Network, num_classes: int) -> FineTuned:
    """The network with a new last layer as the options say. Raises UserError if it cannot have one."""
    layers, factor = _layers_of(network.root), options.last_lr_mult
    if options.layer_before_fullc is None:
        last = _classifier(layers.pop(), num_classes, factor, f"network {network.name}", layers)
    else:
        layers = _until(options.layer_before_fullc, layers, network.name)
        last = _classifier(Dense(NEW_LAYER, num_classes), num_classes, factor)
        if len(chain(*layers).output_shape(network.input_shape)) > 1:
            layers.append(Flatten())
    classifiers = [last]
    for place, layer in enumerate(layers):
        if isinstance(layer, Auxiliary):
            *branch, end = _layers_of(layer.branch)
            classifiers.append(_classifier(end, num_classes, factor, layer.label, layers))
            layers[place] = replace(layer, branch=chain(*branch, classifiers[-1]))
    tuned = replace(network, root=chain(*layers, last), num_classes=num_classes)
    new = {f"{classifier.name}_{kind}" for classifier in classifiers for kind in ("weight", "bias")}
    return FineTuned(tuned, frozenset(parameter.name for parameter in tuned.parameters() if parameter.name in new))


def _layers_of(layer: Layer) -> list[Layer]:
    """The layers of a chain, or the only one."""
    return list(getattr(layer, "layers", [layer]))


def _classifier(last: Layer, num_classes: int, factor: float, where: str = "", others: Sequence[Layer] = ()) -> Dense:
    """The last layer of `where` for other classes; its learning rate is multiplied by `factor`."""
    if not isinstance(last, Dense):
        raise UserError(
            f"{where} ends with {last.label}, not with a fully connected layer: name the layer before the new one with "
            f"--layer-before-fullc, one of {_names(others)}"
        )
    rules = [replace(rule, lr_mult=rule.lr_mult * factor) for rule in (last.weight_rule, last.bias_rule)]
    return replace(last, features=num_classes, weight_rule=rules[0], bias_rule=rules[1])


def _until(name: str, layers: list[Layer], network: str) -> list[Layer]:
    """The layers of the network's main chain up to the one with this name."""
    for place, layer in enumerate(layers):
        if layer.name and layer.name in (name, name.removesuffix("_output")):  # MXNet's name of its output
            return layers[: place + 1]
    raise UserError(
        f"--layer-before-fullc {name}: network {network} has no such layer in its main chain; it has {_names(layers)}"
    )


def _names(layers: Sequence[Layer]) -> str:
    return ", ".join(layer.name for layer in layers if layer.name)


def weights(options: Options, tuned: FineTuned, store: KVStore, log: Logger) -> Trained:
    """The first weights and statistics: those of the checkpoint, except for the new layers. Raises UserError if the
    checkpoint lacks some."""
    prefix, _, epoch = (options.pretrained_model or "").rpartition(",")
    if not prefix or not epoch.isdecimal():
        prefix, epoch = options.pretrained_model or "", ""
    names = graph_file.names_in_files(options.network, tuned.network)
    pretrained = pretrained_weights.shared(prefix, int(epoch) if epoch else None, store, log, names)
    network = tuned.network
    first = initial.first_values(network, options.seed)
    wanted = {
        parameter.name: parameter.shape
        for parameter in (*network.parameters(), *network.auxiliary())
        if parameter.name not in tuned.new
    }
    _check(pretrained.source.name, wanted, pretrained.weights, network.name)
    log.info(
        "Starting from %d arrays of %s; the new last layer has %s and %g times the learning rate",
        len(wanted),
        pretrained.source,
        " and ".join(sorted(tuned.new)),
        options.last_lr_mult,
    )
    return replace(
        pretrained,
        weights={name: pretrained.weights[name] if name in wanted else array for name, array in first.items()},
    )


def _check(source: str, wanted: Mapping[str, tuple[int, ...]], saved: Mapping[str, Array], network: str) -> None:
    wrong = [
        f"{name} (expected {shape}, found {saved[name].shape if name in saved else 'nothing'})"
        for name, shape in wanted.items()
        if name not in saved or saved[name].shape != shape
    ]
    if wrong:
        more = f" and {len(wrong) - NAMED} more" if len(wrong) > NAMED else ""
        raise UserError(
            f"--pretrained-model: {source} does not fit network {network}: {', '.join(wrong[:NAMED])}{more}; choose "
            "--network, its options and --image-shape as they were, or --network PREFIX-symbol.json"
        )
