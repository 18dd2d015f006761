"""The options of the group Fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass

from dmltrain.options.field import Group, option
from dmltrain.options.values import number, path


@dataclass(frozen=True)
class FineTuningOptions(Group):
    """See `Options`."""

    pretrained_model: str | None = option(
        "Fine-tuning",
        "start from the weights of this checkpoint, with a new last layer: PREFIX,EPOCH or PREFIX, its newest one",
        path,
        metavar="PREFIX,EPOCH",
    )
    layer_before_fullc: str | None = option(
        "Fine-tuning",
        "name of the layer after which the new fully connected one follows (default: the layer before the last)",
        str,
        metavar="NAME",
    )
    last_lr_mult: float = option("Fine-tuning", "factor of the new last layer's learning rate", number(0.0), 1.0)
