"""A torch optimizer whose steps use all workers' gradients: what `dmltrain.distribute` returns.

Gradients live in flat buckets of about a mebibyte, in forward order (torch_bucket.py), each a key of the kvstore. A
bucket leaves as soon as backward has produced its last gradient. Then either
- the servers only sum: the sum comes back into the same memory, and the worker's own optimizer makes the step (any
  torch optimizer; dist_sync's default); or
- the servers make the step (dist_async, dist_ssp, and dist_sync with update_on_kvstore): the weights come back into the
  memory of the model's parameters, asked for after backward and awaited just before the next forward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from dmltrain.backends.torch_bucket import Bucket, make_buckets
from dmltrain.backends.torch_optimizer import make_spec
from dmltrain.errors import UserError
from dmltrain.kvstore import TYPES, Handle, KVStore


def distribute(model: torch.nn.Module, optimizer: torch.optim.Optimizer, store: KVStore, *, average: bool = True,
               overlap: bool = True, update_on_kvstore: bool = False) -> DistributedOptimizer:
    """Join `model` and `optimizer` to the other workers of `store`; every worker starts from worker 0's weights.

    average: the mean of the workers' gradients, else their sum (dist_sync). overlap: push during backward; without it
    call `push_gradients`. update_on_kvstore: dist_sync with the optimizer on the servers. Raises UserError for weights
    that are neither float32 nor float64, or an optimizer that servers do not have.
    """
    if not store.is_distributed:
        return DistributedOptimizer(optimizer)
    if TYPES[store.type] != "dist_sync" or update_on_kvstore:
        return _StepOnServers(model, optimizer, store, average, overlap)
    return _StepOnWorkers(model, optimizer, store, average, overlap)


class DistributedOptimizer(torch.optim.Optimizer):
    """The given optimizer, to be used in its place, also by learning-rate schedulers.

    This class is the one for a single worker: it only passes on.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:  # no super().__init__(): state is the inner one's
        self.inner = optimizer
        self._optimizer_step_pre_hooks = optimizer._optimizer_step_pre_hooks
        self._optimizer_step_post_hooks = optimizer._optimizer_step_post_hooks

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    @property
    def state(self) -> Any:
        return self.inner.state

    @property
    def defaults(self) -> dict[str, Any]:
        return self.inner.defaults

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r})"

    def __getstate__(self) -> dict[str, Any]:
        return self.inner.__getstate__()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.inner.add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def push_gradients(self) -> None:
        """Send all gradients, for a caller that has completed them itself (overlap=False)."""

    def reduce_gradients(self) -> None:
        """Wait until the gradients are those of all workers. Needed only where something reads or changes them between
        backward() and step(): clipping, a gradient scaler's unscale_."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return self.inner.step(closure)

    def synchronize(self) -> None:
        """Wait until the model has the weights that follow from all steps so far. Call before evaluation or saving."""

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Backward passes in this context only add to the gradients; the first one after it sends them."""
        yield

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if "servers" in state_dict:
            raise UserError("this state was saved with the optimizer on the servers, here it is on the worker: "
                            "continue with the kvstore (and update_on_kvstore) it was saved with")
        self.inner.load_state_dict(state_dict)


class _Distributed(DistributedOptimizer):
    """What both kinds share: buckets, hooks, pushing during backward."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, store: KVStore, average: bool,
                 overlap: bool) -> None:
        super().__init__(optimizer)
        self.store = store
        self._average, self._overlap, self._holding = average, overlap, False
        self._handles: list[tuple[Bucket, Handle]] = []
        self._buckets = make_buckets(model, optimizer, store.new_name("bucket"))
        self._keys = [bucket.name for bucket in self._buckets]
        store.init(self._keys, [bucket.host_weights() for bucket in self._buckets])
        self._take_first_weights()
        _share_rest(model, self._buckets, store)
        for bucket in self._buckets:
            bucket.watch(self._gradient_ready)

    def _take_first_weights(self) -> None:
        for bucket in self._buckets:
            weights = bucket.host_weights()
            self.store.pull(bucket.name, weights)
            bucket.set_weights(weights)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise UserError("add all parameters to the optimizer before dmltrain.distribute")

    def push_gradients(self) -> None:
        for bucket in reversed(self._buckets):
            if not bucket.pushed:
                bucket.complete()
                self._push(bucket)

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        self._holding = True
        try:
            yield
        finally:
            self._holding = False

    def _gradient_ready(self, bucket: Bucket) -> None:
        if bucket.pushed:
            raise UserError("backward() ran twice before step(): its first gradients have been sent already; "
                            "put all but the last backward() under `with optimizer.accumulate():`")
        if self._holding:
            bucket.begin()  # the gradients that count as the last are those of a later backward
        elif bucket.ready and self._overlap:
            self._push(bucket)

    def _push(self, bucket: Bucket) -> None:
        raise NotImplementedError

    def _wait(self) -> None:
        raise NotImplementedError


class _StepOnWorkers(_Distributed):
    """Servers sum; the worker's own optimizer steps."""

    def _push(self, bucket: Bucket) -> None:
        bucket.pushed = True
        gradients = bucket.host_gradients()
        bucket.note_version()
        handle = self.store.pushpull(bucket.name, gradients, priority=bucket.priority, wait=False)
        self._handles.append((bucket, handle))

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.reduce_gradients()
        self.inner.step()
        for bucket in self._buckets:
            bucket.begin()
        return loss

    def reduce_gradients(self) -> None:
        self.push_gradients()
        for bucket, _ in self._handles:
            bucket.check_unchanged()
        self._wait()

    def _wait(self) -> None:
        factor = 1.0 / self.store.num_workers if self._average and self.store.num_workers > 1 else 1.0
        while self._handles:
            bucket, handle = self._handles.pop(0)
            handle.wait()
            bucket.take_gradients(factor)


class _StepOnServers(_Distributed):
    """Servers step; the worker takes their weights."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, store: KVStore, average: bool,
                 overlap: bool) -> None:
        super().__init__(model, optimizer, store, average, overlap)
        factor = 1.0 / store.num_workers if average and TYPES[store.type] == "dist_sync" else 1.0
        groups = {store.key_number(bucket.name): optimizer.param_groups[bucket.group] for bucket in self._buckets}
        store.set_optimizer(make_spec(optimizer, groups, factor))
        self._settings = self._fixed_settings()
        for bucket in self._buckets:
            bucket.adopt_weights()
        model.register_forward_pre_hook(lambda *_: self._before_forward())

    def _fixed_settings(self) -> list[dict[str, Any]]:
        return [{name: value for name, value in group.items() if name not in ("params", "lr", "initial_lr")}
                for group in self.inner.param_groups]

    def reduce_gradients(self) -> None:
        raise UserError("the optimizer runs on the servers: gradients cannot be changed after backward(); use "
                        "dist_sync with the optimizer on the workers to clip or unscale the sum")

    @torch.compiler.disable
    def _before_forward(self) -> None:
        self._wait()

    def _push(self, bucket: Bucket) -> None:
        bucket.pushed = True
        rate = float(self.inner.param_groups[bucket.group]["lr"])
        self.store.push(bucket.name, bucket.host_gradients(), bucket.priority, rate)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._fixed_settings() != self._settings:
            raise UserError("only the learning rate can be changed while the optimizer runs on the servers; use "
                            "dist_sync with the optimizer on the workers for schedules of momentum or weight decay")
        self.push_gradients()
        self._pull()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._wait()
        super().zero_grad(set_to_none)

    def synchronize(self) -> None:
        self._wait()
        self._pull()
        self._wait()

    def state_dict(self) -> dict[str, Any]:
        servers = [torch.frombuffer(state, dtype=torch.uint8) for state in self.store.optimizer_states()]
        return {**self.inner.state_dict(), "servers": servers}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        servers = state_dict.get("servers")
        if servers is None:
            raise UserError(f"this state was saved with the optimizer on the workers; kvstore {self.store.type} has it "
                            "on the servers here: continue with the kvstore (and update_on_kvstore) it was saved with")
        self.inner.load_state_dict({name: item for name, item in state_dict.items() if name != "servers"})
        self.store.load_optimizer_state_bytes([state.numpy().tobytes() for state in servers])
        self.synchronize()

    def _pull(self) -> None:
        for bucket in self._buckets:
            handle = self.store.pull(bucket.name, bucket.landing, bucket.priority, wait=False)
            self._handles.append((bucket, handle))

    def _wait(self) -> None:
        while self._handles:
            bucket, handle = self._handles.pop(0)
            handle.wait()
            bucket.take_weights()
            bucket.begin()


def _share_rest(model: torch.nn.Module, buckets: list[Bucket], store: KVStore) -> None:
    """Worker 0's frozen parameters and floating-point buffers (batch-norm statistics, masks) for everybody."""
    trained = {parameter for bucket in buckets for parameter in bucket.parameters}
    tensors = [each for each in (*model.parameters(), *model.buffers())
               if each.is_floating_point() and each not in trained]
    if not tensors or store.num_workers == 1:
        return
    with torch.no_grad():
        flat = torch.cat([tensor.double().cpu().reshape(-1) for tensor in tensors])
        own = flat if store.rank == 0 else torch.zeros_like(flat)  # not flat * 0: infinity would become nan
        shared = torch.from_numpy(store.all_reduce(store.new_name("first buffers"), own.numpy()))
        for tensor, part in zip(tensors, shared.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.reshape(tensor.shape))
