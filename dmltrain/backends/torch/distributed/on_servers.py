"""The optimizer on the servers: dist_async, dist_ssp, and dist_sync with update_on_kvstore.

After backward the worker pulls the weights into the memory of the model's parameters. Between two steps the kvstore may
change to another of these (KVStore.between_steps).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dmltrain.backends.torch.distributed import gates
from dmltrain.backends.torch.distributed.buckets import Bucket
from dmltrain.backends.torch.distributed.overlap import Mode, OverlappedOptimizer
from dmltrain.backends.torch.optimizer import row_of
from dmltrain.backends.torch.server_optimizer import make_spec, plain
from dmltrain.errors import UserError
from dmltrain.kvstore import Handle, KVStore
from dmltrain.kvstore.types import KVStoreType


class OptimizerOnServers(OverlappedOptimizer):
    """See the module. Without `defer` the model's forward starts after all weights have arrived."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, store: KVStore, mode: Mode) -> None:
        row = row_of(optimizer)
        super().__init__(model, optimizer, store, mode, whole=row is not None and not row.elementwise)
        self._average = mode.average
        self._factor = self._factor_of(store.kvstore_type)
        groups = {
            store.key_number(bucket.name): {
                **optimizer.param_groups[bucket.group],
                "number": optimizer.state.get(bucket.parameters[0], {}).get("number"),
            }
            for bucket in self._buckets
        }
        store.set_optimizer(make_spec(optimizer, groups, self._factor))
        self._scale = 1.0  # of gradients, where the servers' factor is of another type of kvstore
        self._needs_pulled = row is not None and row.needs_pulled
        store.follow_changes([bucket.name for bucket in self._buckets], self._refusal)
        self._settings = self._fixed_settings()
        for bucket in self._buckets:
            bucket.adopt_weights()
        if not self._defer:
            gates.before_forward(model, self.settle)

    @property
    def state(self) -> Any:  # type: ignore[override]  # read-only here
        """That of the inner optimizer, which makes no steps: there is nothing to wait for."""
        return self.inner.state

    def _fixed_settings(self) -> list[dict[str, Any]]:
        return [
            {name: plain(value) for name, value in group.items() if name not in ("params", "lr", "initial_lr")}
            for group in self.inner.param_groups
        ]

    def reduce_gradients(self) -> None:
        raise UserError(
            "the optimizer runs on the servers: gradients cannot be changed after backward(); use "
            "dist_sync with the optimizer on the workers to clip or unscale the sum"
        )

    def _factor_of(self, kind: KVStoreType) -> float:
        """By which a sum of pushes is multiplied."""
        return 1.0 / self.store.num_workers if self._average and kind.synchronous else 1.0

    def _refusal(self, kind: KVStoreType) -> str:
        """Why the kvstore cannot change to this type; empty if it can."""
        if kind.synchronous and self._needs_pulled:
            return f"optimizer {type(self.inner).__name__} makes sense only where each push is a step"
        return ""

    def _push(self, bucket: Bucket) -> None:
        bucket.pushed = True
        if self._scale != 1.0:
            with torch.no_grad():
                bucket.weigh(self._scale)
        rate = float(self.inner.param_groups[bucket.group]["lr"])
        self.store.push(bucket.name, bucket.host_gradients(), bucket.priority, rate)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_settings()
        self.push_gradients()
        self._pull()
        if self.store.between_steps(self.settle):
            self._scale = self._factor_of(self.store.kvstore_type) / self._factor
        return loss

    def _check_settings(self) -> None:
        if self._fixed_settings() != self._settings:
            raise UserError(
                "only the learning rate can be changed while the optimizer runs on the servers; use "
                "dist_sync with the optimizer on the workers for schedules of momentum or weight decay"
            )

    def synchronize(self) -> None:
        self.settle()
        self._pull()
        self.settle()

    def state_dict(self) -> dict[str, Any]:
        servers = [torch.frombuffer(state, dtype=torch.uint8) for state in self.store.optimizer_states()]
        return {**self.inner.state_dict(), "servers": servers}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        servers = state_dict.get("servers")
        if servers is None:
            raise UserError(
                f"this state was saved with the optimizer on the workers, but kvstore {self.store.type} now runs it on "
                "the servers: resume with the kvstore (and update_on_kvstore) that it was saved with"
            )
        self._load_inner({name: item for name, item in state_dict.items() if name != "servers"})
        self.store.load_optimizer_state_bytes([state.numpy().tobytes() for state in servers])
        self.synchronize()

    def _pull(self) -> None:
        for bucket in self._buckets:
            bucket.stepped = True
            self._pending[bucket] = self.store.pull(bucket.name, bucket.pulled, bucket.priority, wait=False)

    def _take(self, bucket: Bucket, handle: Handle) -> None:
        bucket.take_weights()
        bucket.begin()
