"""Communication hooks of DistributedDataParallel: gradients travel encoded, over the servers of the job.

    model.register_comm_hook(hooks.State(), hooks.int8)

The codecs, their residuals and the servers' sums are those of `--gc-type` (dmltrain/kvstore/codec). A bucket that comes
for the first time travels as it is: DistributedDataParallel arranges its buckets anew after the first step, and a
residual belongs to a bucket. (torch reads the annotations of hooks as values, so this module does not postpone them.)
"""

import functools
import itertools
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.weak import WeakTensorKeyDictionary

from dmltrain.backends.torch.gpu import pinned
from dmltrain.backends.torch.gpu.pinned import Arrival, PushedMemory, arrive, begin_copies
from dmltrain.backends.torch.process_group.group import Group
from dmltrain.backends.torch.process_group.staging import StagedWork, on_host
from dmltrain.backends.torch.process_group.sums import SumsOnServers
from dmltrain.base.errors import UserError

Future = torch.futures.Future[torch.Tensor]
_numbers = itertools.count()


@dataclass
class Bucket:
    """Gradients that travel together. `key`: of the kvstore; "" as long as they have come once only. `host`:
    of a GPU that encodes and decodes them."""

    parameters: list[Callable[[], Any]]  # weak references
    key: str = ""
    host: PushedMemory | None = None

    def has(self, parameters: list[torch.Tensor]) -> bool:
        own = [parameter() for parameter in self.parameters]
        return len(own) == len(parameters) and all(map(lambda one, two: one is two, own, parameters))


class State:
    """What a hook of one model keeps: the residuals of this worker, which the next gradients get. `process_group`: the
    one that the model has; None: the default group. `ratio`: of topk; `threshold`: of two_bit (docs/compression.md).

    All workers must make their states, or load them, in the same order. Pickle keeps what `state_dict` returns; the
    process group is then the default one, as with torch's states.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        ratio: float | None = None,
        threshold: float | None = None,
    ) -> None:
        self.process_group, self._parameters = process_group, {"ratio": ratio, "threshold": threshold}
        self._name = f"hook {next(_numbers)}"
        self._buckets: Any = WeakTensorKeyDictionary()  # first parameter -> Bucket
        self._keys: list[str] = []
        self._loaded: list[torch.Tensor] = []  # residuals of keys, which are to be declared

    def state_dict(self) -> dict[str, Any]:
        """This worker's residuals; those of worker 0 have the servers' too. Each worker saves its own. Call it between
        two steps; the others need not call it. Raises JobLost."""
        own = _servers_of(self.process_group)[1].store.residuals_of(self._keys) if self._keys else []
        residuals = [*map(torch.from_numpy, own), *self._loaded[len(own) :]]
        return {"rank": dist.get_rank(self.process_group), "residuals": residuals}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What `state_dict` has returned on this worker. A worker that gets another one's begins with residuals of
        zero: else they would count more than once. Raises UserError after the first step."""
        if self._keys:
            raise UserError("the state of a communication hook: call load_state_dict before the first step")
        same = state["rank"] == dist.get_rank(self.process_group)
        self._loaded = list(state["residuals"]) if same else []

    def __getstate__(self) -> dict[str, Any]:
        return {"parameters": self._parameters, "kept": self.state_dict() if self._keys or self._loaded else None}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__init__(**state["parameters"])  # type: ignore[misc]
        if state["kept"]:
            self.load_state_dict(state["kept"])

    def mean(self, codec: str, bucket: GradBucket) -> Future:
        """The mean of all workers' gradients, in the bucket's own buffer (elements,). Raises UserError if there are no
        servers."""
        group, sums = _servers_of(self.process_group, codec)
        buffer = bucket.buffer()
        known = self._known(bucket.parameters())
        if known is None or buffer.dtype == torch.float64:  # codecs are of float32
            return default_hooks.allreduce_hook(group, bucket)
        if not known.key:
            self._declare(known, sums, codec, buffer)
        land: Callable[[], Any]
        if known.host and known.host.arriving:
            begin_copies(buffer.device, [(known.host, buffer)])
            start = functools.partial(sums.start_coded, known.key, buffer, known.host.complete(), known.host.out)
            land = functools.partial(arrive, [Arrival(known.host.arriving, buffer, 1.0 / group.size())])
        else:
            values = on_host(buffer).to(torch.float32)
            start = functools.partial(sums.start_coded, known.key, values, values.numpy(), values.numpy())
            land = functools.partial(_take_mean, buffer, values, 1.0 / group.size())
        work = group.own(f"the {codec} hook's mean of float32 ({len(buffer)},)", start)
        return StagedWork(work, land, [buffer]).get_future().then(lambda done: done.value()[0])

    def _known(self, parameters: list[torch.Tensor]) -> Bucket | None:
        """The bucket of these parameters; None if it comes for the first time."""
        before = self._buckets.get(parameters[0])
        if before and before.has(parameters):
            return before  # type: ignore[no-any-return]
        self._buckets[parameters[0]] = Bucket([weakref.ref(parameter) for parameter in parameters])
        return None

    def _declare(self, bucket: Bucket, sums: SumsOnServers, codec: str, buffer: torch.Tensor) -> None:
        """The key of the next bucket."""
        number, size, store = len(self._keys), len(buffer), sums.store
        key = f"{self._name} bucket {number}"
        loaded = self._loaded[number] if number < len(self._loaded) else torch.zeros(0)
        if len(loaded) not in (0, size):
            raise UserError(
                f"the loaded state of hook {codec} has {len(loaded)} elements in bucket {number}, the model {size}: "
                "load it with the model and the bucket_cap_mb that it was saved with"
            )
        store.init(key, np.zeros(size, np.float32), compression={"type": codec, **self._parameters})
        if not buffer.is_cpu and (encodings := pinned.encodings(store, key)):
            pinned.register(store, [], encodings)
            bucket.host = PushedMemory(np.empty(0), buffer.device, encodings=encodings)
        if len(loaded):
            store.add_residual(key, loaded.numpy())
        self._keys.append(key)
        bucket.key = key


def _take_mean(buffer: torch.Tensor, values: torch.Tensor, factor: float) -> None:
    buffer.copy_(values.mul_(factor))


def _servers_of(group: dist.ProcessGroup | None, codec: str = "") -> tuple[Group, SumsOnServers]:
    """Raises UserError if the group has no servers."""
    group = group or dist.distributed_c10d._get_default_group()
    if not isinstance(group, Group):
        raise UserError(
            f"the hook {codec} needs dmltrain's servers, this group has the backend {dist.get_backend(group)}: "
            'call init_process_group("dmltrain")'
        )
    if group.sums is None:
        raise UserError(
            f"the hook {codec} needs servers, and a group with all workers of the job: start the job with -s 1 or "
            "more, and register the hook with the default group; or use torch's own hooks"
        )
    return group, group.sums


@functools.cache
def _of_all_models(codec: str) -> State:
    """In place of None."""
    return State()


def _hook(codec: str, name: str) -> Callable[[State | None, GradBucket], Future]:
    def hook(state: State | None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        if not isinstance(state, (State, type(None))):
            raise UserError(
                f"register_comm_hook({type(state).__name__}, ...): expected dmltrain.torch.hooks.State() or None"
            )
        return (state or _of_all_models(codec)).mean(codec, bucket)

    hook.__doc__ = f"The mean of gradients that travel as {codec}."
    hook.__name__ = hook.__qualname__ = name  # by which pickle finds it
    return hook


def none(state: State | None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The mean of gradients that travel as they are, as without a hook."""
    return default_hooks.allreduce_hook(state and state.process_group, bucket)  # type: ignore[arg-type]


bf16, fp16, int8, topk = (_hook(codec, codec) for codec in ("bf16", "fp16", "int8", "topk"))
two_bit = _hook("2bit", "two_bit")
