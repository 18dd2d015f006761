"""The optimizer on the servers: dist_async, dist_ssp, and dist_sync with update_on_kvstore.

Each worker pushes its own gradients, and pulls weights. There are two ways:
- `step()` pushes the gradients of that moment, and returns when the pulled weights are in the model. The servers own
  the weights, so `step()` raises an error if the script has changed weights since.
- Early: gradients are pushed during backward, and weights are pulled into the memory of the model's parameters. The
  next forward waits for them. The script must not change gradients or weights.

Between two steps the kvstore may change to another of these types (KVStore.between_steps).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from dmltrain.backends.torch.distributed import backward, parameter_hooks
from dmltrain.backends.torch.distributed.buckets import Bucket, memory_order, same_bits
from dmltrain.backends.torch.distributed.overlap import OverlappedOptimizer
from dmltrain.backends.torch.optimizer import row_of
from dmltrain.backends.torch.server_optimizer import make_spec, plain
from dmltrain.base.errors import UserError
from dmltrain.kvstore.base import Handle, KVStore
from dmltrain.kvstore.choices import ExchangeChoices
from dmltrain.kvstore.types import KVStoreType

ORDERS = "orders"  # in a state_dict, beside "servers"


class OptimizerOnServers(OverlappedOptimizer):
    """See the module. Without `defer` the model's forward starts after all weights have arrived."""

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, store: KVStore, choices: ExchangeChoices
    ) -> None:
        row = row_of(optimizer)
        super().__init__(model, optimizer, store, choices, whole=row is not None and not row.elementwise)
        self._average = choices.average
        self._factor = self._factor_of(store.kvstore_type)
        groups = {
            store.key_number(bucket.name): {
                **optimizer.param_groups[bucket.group],
                "number": optimizer.state.get(bucket.parameters[0], {}).get("number"),
            }
            for bucket in self._buckets
        }
        store.set_optimizer(make_spec(optimizer, groups, self._factor))
        self._scale = 1.0  # of gradients: corrects the servers' factor after a change of the kvstore's type
        self._needs_pulled = row is not None and row.needs_pulled
        store.follow_changes([bucket.name for bucket in self._buckets], self._refusal)
        self._settings = self._fixed_settings()
        for bucket in self._buckets:
            if choices.step_early:
                bucket.adopt_weights()
            else:
                bucket.pulled = bucket.host_weights()
        self._has_gradients = False  # whether the buckets hold copies of the gradients that the last backward left
        if not choices.step_early:
            self._watch()
        if choices.step_early and not self._defer:
            parameter_hooks.before_forward(model, self.settle, self.settle)

    @property
    def state(self) -> Any:  # type: ignore[override]  # read-only here
        """The inner optimizer's state. That optimizer makes no steps here, so there is nothing to wait for."""
        return self.inner.state

    def _fixed_settings(self) -> list[dict[str, Any]]:
        return [
            {name: plain(value) for name, value in group.items() if name not in ("params", "lr", "initial_lr")}
            for group in self.inner.param_groups
        ]

    def reduce_gradients(self) -> None:
        raise UserError(
            "the optimizer runs on the servers, so no worker has the mean of all workers' gradients: to clip or scale "
            "it, run the optimizer on the workers (dist_sync without update_on_kvstore)"
        )

    def _factor_of(self, kind: KVStoreType) -> float:
        """The servers multiply a sum of pushes by this."""
        return 1.0 / self.store.num_workers if self._average and kind.synchronous else 1.0

    def _refusal(self, kind: KVStoreType) -> str:
        """Why the kvstore cannot change to this type; empty if it can."""
        if kind.synchronous and self._needs_pulled:
            return f"optimizer {type(self.inner).__name__} makes sense only where each push is a step"
        return ""

    def _watch(self) -> None:
        backward.install()
        self.number = backward.next_number()

        def hook(_: torch.nn.Parameter) -> None:  # no bound method, which a copy of the model would copy
            backward.reached(self)

        for bucket in self._buckets:
            for parameter in bucket.parameters:
                self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))

    def finish(self) -> None:
        """An outermost backward() has ended."""
        if self.store.kvstore_type.synchronous:
            for bucket in self._buckets:
                bucket.fill()
            self._has_gradients = True

    def failed(self, error: BaseException) -> None:
        self._has_gradients = False

    def _push(self, bucket: Bucket) -> None:
        bucket.pushed = True
        if self._scale != 1.0:
            with torch.no_grad():
                bucket.weigh(self._scale)
        rate = float(self.inner.param_groups[bucket.group]["lr"])
        self.store.push(bucket.name, bucket.host_gradients(), bucket.priority, rate)
        bucket.note_sent()

    def _is_under_way(self, bucket: Bucket) -> bool:
        return True  # servers make the step

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_settings()
        if self._early:
            self._check_early()
        else:
            self._check_weights()
            self._check_used()
            self._check_gradients()
        self.push_gradients()
        self._has_gradients = False
        self._share_buffers()
        self._pull()
        if not self._early:
            self.settle()
        if self.store.between_steps(self.settle):
            self._scale = self._factor_of(self.store.kvstore_type) / self._factor
        return loss

    def _check_early(self) -> None:
        for bucket in self._buckets:
            bucket.check_adopted()
            if bucket.pushed:
                bucket.check_unchanged()

    def _check_settings(self) -> None:
        if self._fixed_settings() != self._settings:
            raise UserError(
                "only the learning rate can be changed while the optimizer runs on the servers; use "
                "dist_sync with the optimizer on the workers for schedules of momentum or weight decay"
            )

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
        for parameter in (parameter for group in self.inner.param_groups for parameter in group["params"]):
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

    def _check_weights(self) -> None:
        """Raise UserError if the weights differ from those that were pulled."""
        for bucket in self._buckets:
            for view, parameter in zip(bucket.cut(torch.from_numpy(bucket.pulled)), bucket.parameters, strict=True):
                if parameter.dtype != view.dtype or not same_bits(parameter.detach().cpu(), view):
                    raise UserError(
                        f"parameter {self._names[parameter]} was changed by the script, but its value is the servers', "
                        "where the optimizer runs: load and change weights before dmltrain.distribute, or use "
                        "dist_sync with the optimizer on the workers"
                    )

    def synchronize(self) -> None:
        self.settle()
        if not self._early:
            self._check_weights()
        self._refresh()

    def _refresh(self) -> None:
        self._pull()
        self.settle()

    def state_dict(self) -> dict[str, Any]:
        servers = [torch.frombuffer(state, dtype=torch.uint8) for state in self.store.optimizer_states()]
        return {**self.inner.state_dict(), "servers": servers, ORDERS: self._orders()}

    def _orders(self) -> dict[int, list[int]]:
        """Number of a parameter in the optimizer -> the order of its dimensions in the servers' state, see
        buckets.memory_order."""
        parameters = [parameter for group in self.inner.param_groups for parameter in group["params"]]
        numbers = {parameter: number for number, parameter in enumerate(parameters)}
        return {
            numbers[parameter]: memory_order(view)
            for bucket in self._buckets
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True)
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        servers = state_dict.get("servers")
        if servers is None:
            raise UserError(
                f"this state was saved with the optimizer on the workers, but kvstore {self.store.type} now runs it on "
                "the servers: resume with the kvstore (and update_on_kvstore) that it was saved with"
            )
        self._check_orders(state_dict.get(ORDERS, {}))
        self._load_inner({name: item for name, item in state_dict.items() if name not in ("servers", ORDERS)})
        self.store.load_optimizer_state_bytes([state.numpy().tobytes() for state in servers])
        self.settle()
        self._refresh()

    def _check_orders(self, saved: Mapping[int, list[int]]) -> None:
        parameters = [parameter for group in self.inner.param_groups for parameter in group["params"]]
        for number, order in self._orders().items():
            if saved.get(number, order) != order:
                raise UserError(
                    f"the servers' state of parameter {self._names[parameters[number]]} has its dimensions in the "
                    f"order {saved[number]} in memory, and the model here {order}: load it with the memory format that "
                    "it was saved with (model.to(memory_format=...) before dmltrain.distribute)"
                )

    def _pull(self) -> None:
        for bucket in self._buckets:
            bucket.stepped = True
            self._pending[bucket] = self.store.pull(bucket.name, bucket.pulled, bucket.priority, wait=False)

    def _take(self, bucket: Bucket, handle: Handle) -> None:
        if self._early:
            bucket.take_weights()
        else:
            bucket.set_weights(torch.from_numpy(bucket.pulled))
        bucket.begin()
