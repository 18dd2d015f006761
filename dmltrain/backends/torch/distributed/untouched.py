"""What a script must leave as it is while the optimizer runs on the servers."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from dmltrain.backends.torch.distributed import backward
from dmltrain.backends.torch.distributed.buckets import same_bits
from dmltrain.backends.torch.distributed.gradients.pushes import PushedGradients
from dmltrain.backends.torch.server_optimizer import plain
from dmltrain.base.errors import UserError
from dmltrain.kvstore.base import KVStore


class Untouched:
    """See the module. The buckets have all parameters that are trained, and in `pulled` the weights that the servers
    have sent."""

    def __init__(self, gradients: PushedGradients, store: KVStore) -> None:
        self._gradients, self._store = gradients, store  # the hooks of `watch` keep the gradients alive: see owners.py
        self._inner, self._buckets, self._names = gradients.inner, gradients.buckets, gradients.names
        self._settings = self._fixed_settings()
        self._has_gradients = False  # whether the buckets hold copies of the gradients that the last backward left

    def _fixed_settings(self) -> list[dict[str, Any]]:
        return [
            {name: plain(value) for name, value in group.items() if name not in ("params", "lr", "initial_lr")}
            for group in self._inner.param_groups
        ]

    def check_settings(self) -> None:
        """Raise UserError for other changes of the optimizer's options than that of the learning rate."""
        if self._fixed_settings() != self._settings:
            raise UserError(
                "only the learning rate can be changed while the optimizer runs on the servers; use "
                "dist_sync with the optimizer on the workers for schedules of momentum or weight decay"
            )

    def check(self, early: bool) -> None:
        """Raise UserError for changes of weights or gradients. `early`: these were pushed during backward."""
        if not early:
            self.check_weights()
            self._check_used()
            self._check_gradients()
            return
        for bucket in self._buckets:
            bucket.weights.check_adopted(bucket.names)
            if bucket.pushed:
                bucket.check_unchanged()

    # -- without early pushes -------------------------------------------------------------------------------------

    def watch(self) -> list[RemovableHandle]:
        """Copy gradients at the end of each backward from now on. Returns the hooks for that."""
        backward.install()
        self.number = backward.next_number()

        def hook(_: torch.nn.Parameter) -> None:  # no bound method, which a copy of the model would copy
            backward.reached(self)

        parameters = [parameter for bucket in self._buckets for parameter in bucket.parameters]
        return [parameter.register_post_accumulate_grad_hook(hook) for parameter in parameters]

    def finish(self) -> None:
        """An outermost backward() has ended."""
        if self._store.kvstore_type.synchronous:
            for bucket in self._buckets:
                bucket.fill()
            self._has_gradients = True

    def failed(self, error: BaseException) -> None:
        self._has_gradients = False

    def sent(self) -> None:
        """The gradients are sent, and may change."""
        self._has_gradients = False

    def _check_gradients(self) -> None:
        """Raise UserError for gradients that the script has changed. A change such as clipping is meant for the mean of
        all workers, and is wrong for one worker's part of it. With dist_async and dist_ssp each worker's gradient makes
        a step of its own, so there the script may change gradients."""
        for bucket in self._buckets if self._has_gradients else ():
            for view, parameter in zip(bucket.views, bucket.parameters, strict=True):
                gradient = parameter.grad
                if gradient is None or not same_bits(view, gradient.to_dense()):
                    raise UserError(
                        f"the gradient of parameter {self._names[parameter]} was changed after backward(), but it is "
                        "this worker's own, of which the servers make the mean: clip, scale or mask gradients with the "
                        "optimizer on the workers (dist_sync without update_on_kvstore)"
                    )

    def _check_used(self) -> None:
        """Raise UserError for parameters that have no gradient although servers step them, and for parameters that have
        one although servers do not."""
        own = {parameter for bucket in self._buckets for parameter in bucket.parameters}
        for parameter in (parameter for group in self._inner.param_groups for parameter in group["params"]):
            if parameter in own and parameter.grad is None:
                raise UserError(
                    f"parameter {self._names[parameter]} has no gradient in this step, and the optimizer on the "
                    "servers would step it with zeros: freeze it before dmltrain.distribute, or run the optimizer on "
                    "the workers (dist_sync without update_on_kvstore)"
                )
            if parameter not in own and parameter.grad is not None:
                raise UserError(
                    f"parameter {self._names[parameter]} was frozen at dmltrain.distribute, so the optimizer on the "
                    "servers does not have it: use dist_sync with the optimizer on the workers to train it later"
                )

    def check_weights(self) -> None:
        """Raise UserError if the weights differ from those that were pulled."""
        for bucket in self._buckets:
            views = bucket.places.cut(torch.from_numpy(bucket.weights.pulled))
            for view, parameter in zip(views, bucket.parameters, strict=True):
                if parameter.dtype != view.dtype or not same_bits(parameter.detach().cpu(), view):
                    raise UserError(
                        f"parameter {self._names[parameter]} was changed by the script, but its value is the servers', "
                        "where the optimizer runs: load and change weights before dmltrain.distribute, or use "
                        "dist_sync with the optimizer on the workers"
                    )
