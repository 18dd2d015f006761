"""The state of a PyTorch training: what a checkpoint holds, and what others give a worker of an elastic job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from dmltrain.backends.backend import CommonArray
from dmltrain.backends.torch import state as torch_state
from dmltrain.backends.torch.distributed import DistributedOptimizer
from dmltrain.backends.torch.distributed.local_steps import OUTER
from dmltrain.backends.torch.loss_scale import LossScale
from dmltrain.backends.torch.optimizer import load_state
from dmltrain.backends.torch.replicas import TorchReplicas
from dmltrain.base.arrays import Array
from dmltrain.base.errors import UserError
from dmltrain.kvstore.base import KVStore

FACTORED = "factored"  # in checkpoints: the weights whose gradients were sent as factors
AVERAGE = "average"  # in checkpoints: the average of weights, "model" in it, beside the model
OWN_STATES = "workers"  # in checkpoints: the own states of workers 1, 2, ...
RESIDUALS_OF_04 = "held_back"  # their name in checkpoints up to version 0.4


class TrainingState:
    """That of these replicas, the optimizer and the loss scale. See Trainer for `give`, `take` and `own`, its `state`,
    `take_state` and `own_state`."""

    def __init__(
        self, replicas: TorchReplicas, optimizer: DistributedOptimizer, scale: LossScale | None, steps_alone: bool
    ) -> None:
        self._replicas, self._optimizer, self._scale, self._steps_alone = replicas, optimizer, scale, steps_alone

    def give(self, residuals: Mapping[str, Array] | None, others: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        state: dict[str, Any] = {"model": self._replicas.state(), "optimizer": self._optimizer.state_dict()}
        if self._optimizer.choices:
            state[FACTORED] = [choice.layer.name for choice in self._optimizer.choices if choice.as_factors]
        if self._scale is not None:
            state["loss_scale"] = self._scale.state()
        if self._replicas.average:
            state[AVERAGE] = self._replicas.average.state()
        if residuals:
            state["residuals"] = {name: torch.from_numpy(array) for name, array in residuals.items()}
        if others:
            state[OWN_STATES] = list(others)
        return state

    def take(self, state: Mapping[str, Any], only_step: bool) -> None:
        keeps_own = only_step and self._steps_alone
        own = {"state": self._optimizer.state_dict()["state"]} if keeps_own else {}
        self._optimizer.forget_round()
        self._replicas.load(state["model"], only_step)
        load_state(self._optimizer, {**state["optimizer"], **own})
        if self._replicas.average:
            self._replicas.average.load(state[AVERAGE], only_step)
        if self._scale is not None and not keeps_own:
            self._scale.load_state(state["loss_scale"])

    def own(self) -> dict[str, Any]:
        """Where workers step alone, the optimizer's state and the loss scale; else nothing."""
        if not self._steps_alone:
            return {}
        scale = {} if self._scale is None else {"loss_scale": self._scale.state()}
        return {"optimizer": self._optimizer.state_dict()["state"], **scale}

    def resume(self, state: Mapping[str, Any], store: KVStore) -> None:
        """Load what a checkpoint has besides the model. Without "optimizer" in it the optimizer starts anew."""
        state = with_own_state(state, store.rank) if self._steps_alone else state
        residuals = state.get("residuals", state.get(RESIDUALS_OF_04))
        if residuals is not None or "servers" in state.get("optimizer", {}):
            self._check_order(state["model"])
        if "optimizer" in state:
            load_state(self._optimizer, state["optimizer"])
        if self._replicas.average and AVERAGE in state:
            self._replicas.average.load(state[AVERAGE])
        were_alone = OUTER in state.get("optimizer", {})
        # With dist_local, codecs compress differences of weights: residuals of gradients do not fit these.
        if residuals is not None and were_alone == self._steps_alone:
            store.load_residuals({name: tensor.numpy() for name, tensor in residuals.items()})
        if self._scale is not None and "loss_scale" in state:
            self._scale.load_state(state["loss_scale"])

    def _check_order(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Raise UserError unless the weights were saved in the memory order that they have here: the servers' states
        and the residuals are flat memory in that order."""
        for name, own in self._replicas.modules[0].named_parameters():
            if saved[name].stride() != own.stride():
                layout = "contiguous" if saved[name].is_contiguous() else "channels_last"
                raise UserError(
                    f"the checkpoint has the servers' optimizer state or residuals in another memory order (weight "
                    f"{name}): resume with --memory-format {layout}"
                )

    def common_arrays(self) -> list[CommonArray]:
        """See Trainer."""
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        arrays = self._replicas.common_arrays()
        arrays += self._replicas.average.common_arrays() if self._replicas.average else []
        arrays += torch_state.common_of_optimizer(parameters, self._optimizer.common_state)
        if (scale := self._scale) and not self._steps_alone:
            read, write = (lambda: np.array(scale.state())), (lambda values: scale.load_state(values.tolist()))
            arrays.append(CommonArray("loss scale", read, write))
        return arrays


def with_own_state(state: Mapping[str, Any], rank: int) -> Mapping[str, Any]:
    """A checkpoint's state, with the own state of the worker of this rank; with worker 0's if the checkpoint has fewer
    workers."""
    others = state.get(OWN_STATES, [])
    if not 0 < rank <= len(others) or "optimizer" not in state:
        return state
    own = others[rank - 1]
    return {**state, **own, "optimizer": {**state["optimizer"], "state": own["optimizer"]}}
