"""The optimizers, by MXNet's names where it has them. A new one is one file and one row of TABLE; this imports no
framework."""

from __future__ import annotations

from dmltrain.optimizers import (
    adadelta,
    adagrad,
    adam,
    adamax,
    adamw,
    dcasgd,
    ftml,
    ftrl,
    lamb,
    lars,
    lbsgd,
    lion,
    muon,
    nadam,
    nag,
    rmsprop,
    sgd,
    sgld,
    signum,
)
from dmltrain.optimizers.optimizer import MXNet, Optimizer, Torch

__all__ = ["BY_NAME", "NAMES", "TABLE", "MXNet", "Optimizer", "Torch"]

TABLE: tuple[Optimizer, ...] = (
    sgd.OPTIMIZER,
    nag.OPTIMIZER,
    signum.OPTIMIZER,
    adam.OPTIMIZER,
    adamw.OPTIMIZER,
    adamax.OPTIMIZER,
    nadam.OPTIMIZER,
    ftml.OPTIMIZER,
    lamb.OPTIMIZER,
    lars.OPTIMIZER,
    lbsgd.OPTIMIZER,
    dcasgd.OPTIMIZER,
    sgld.OPTIMIZER,
    adagrad.OPTIMIZER,
    adadelta.OPTIMIZER,
    rmsprop.OPTIMIZER,
    ftrl.OPTIMIZER,
    lion.OPTIMIZER,
    muon.OPTIMIZER,
)
BY_NAME = {optimizer.name: optimizer for optimizer in TABLE}
NAMES = tuple(optimizer.name for optimizer in TABLE if optimizer.torch)  # of --optimizer
