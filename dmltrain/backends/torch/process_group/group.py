"""A process group: large sums of floats over the servers of the job, some operations in the memory of one host
(host_collectives.py), everything else over gloo."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, PrefixStore, Store
from torch.distributed import distributed_c10d as c10d

from dmltrain.backends.torch.process_group.calls import Call, Calls, described
from dmltrain.backends.torch.process_group.host_collectives import (
    Broadcast,
    End,
    Gather,
    HostCollectives,
    Operation,
    ScatteredSum,
)
from dmltrain.backends.torch.process_group.staging import staged, tensors_of
from dmltrain.backends.torch.process_group.sums import SumsOnServers, is_sum
from dmltrain.backends.torch.process_group.watch import Watch
from dmltrain.backends.torch.process_group.work import GlooWork, OwnWork, Works
from dmltrain.base.arrays import Array
from dmltrain.base.errors import JobLost

CPU = torch.device("cpu")
OPERATIONS = {  # of torch.distributed.ProcessGroup -> the function that a script calls
    "all_gather_single_coalesced": "all_gather_into_tensor",
    "all_to_all_single": "all_to_all_single",
    "allgather_coalesced": "all_gather_coalesced",
    "allgather_into_tensor_coalesced": "all_gather_into_tensor",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
    "gather": "gather",
    "reduce": "reduce",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor",
    "scatter": "scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor",
}
NAMES = {
    **OPERATIONS,
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce_coalesced",
    "allgather": "all_gather",
    "_allgather_base": "all_gather_into_tensor",
    "all_gather_single": "all_gather_into_tensor",
    "barrier": "barrier",
    "broadcast": "broadcast",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
}
# Each group of gloo stays until the process ends. Else the process can hang: the thread that drops the last reference
# (of a DistributedDataParallel that ends after destroy_process_group()) holds the GIL and waits for the group's
# threads, while one of these waits for the GIL.
_gloo: list[Any] = []
POINT_TO_POINT = ("recv", "recv_anysource", "send")  # which not all members call, so their order says nothing


class Group(dist.ProcessGroup):
    """`sums`: makes sums over the servers or in shared memory; None in a job without servers, and for a group without
    all workers of the job. `ranks`: the members' numbers among the workers of the job. `address`: of this host on the
    training network; "": gloo chooses one."""

    def __init__(
        self,
        store: Store,
        ranks: list[int],
        rank: int,
        timeout: datetime.timedelta,
        address: str,
        watch: Watch,
        sums: SumsOnServers | None,
    ) -> None:
        super().__init__(rank, len(ranks))  # type: ignore[call-arg]
        self.gloo = dist.ProcessGroupGloo(store, rank, len(ranks), _options(address, timeout))
        _gloo.append(self.gloo)
        self.gloo._set_sequence_number_for_group()
        self._over: Any = _plain(store, rank, len(ranks), self.gloo, timeout)
        _register(self, self.gloo)
        self.sums, self._watch, self._limit = sums, watch, timeout.total_seconds()
        own: Any = PrefixStore("calls", store)
        self.calls = Calls(own.clone(), rank, ranks)
        watch.add(self)

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        return "dmltrain"

    def _get_backend(self, device: torch.device) -> Any:
        """For all devices, as tensors of GPUs are copied: torch asks for that of init_process_group(device_id=...)."""
        return self.gloo

    def barrier(self, opts: Any = None) -> dist.Work:
        opts = opts or dist.BarrierOptions()
        opts.device = CPU  # in place of that of barrier(device_ids=[...])
        return self._over_gloo("barrier", opts)

    def allreduce(  # type: ignore[override]
        self, tensors: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        opts = opts or dist.AllreduceOptions()
        if self.sums and len(tensors) == 1 and self.sums.takes(tensors[0], opts.reduceOp):
            average = opts.reduceOp == dist.ReduceOp.AVG
            start = functools.partial(self.sums.start, tensors[0], 1.0 / self.size() if average else 1.0)
            return self.own(described("all_reduce", tensors, opts), start)
        return self._reduced("allreduce", tensors, opts)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        opts = opts or dist.AllreduceCoalescedOptions()
        if not (self.sums and any(self.sums.takes(tensor, opts.reduceOp) for tensor in tensors)):
            return self._reduced("allreduce_coalesced", tensors, opts)
        each = dist.AllreduceOptions()
        each.reduceOp = opts.reduceOp
        return Works([self.allreduce([tensor], each) for tensor in tensors])

    def _reduced(self, name: str, tensors: list[torch.Tensor], opts: Any) -> dist.Work:
        """gloo has no mean. That of whole numbers is rounded towards 0, as NCCL's is."""
        if opts.reduceOp != dist.ReduceOp.AVG:
            return self._over_gloo(name, tensors, opts)
        call = self.calls.begin(described(NAMES[name], tensors, opts))
        opts.reduceOp = dist.ReduceOp.SUM
        whole = [tensor for tensor in tensors if not (tensor.is_floating_point() or tensor.is_complex())]
        for tensor in tensors if not whole else []:
            tensor.div_(self.size())
        work = self._guarded(call, name, tensors, opts)
        if whole:
            work.wait()
        for tensor in whole:
            tensor.div_(self.size(), rounding_mode="trunc")
        return work

    def own(self, what: str, start: Callable[[], OwnWork]) -> OwnWork:
        """An operation that gloo does not make, which `start` begins. `what`: for messages."""
        call = self.calls.begin(what, self._limit)
        try:
            call.work = work = start()
        except JobLost as error:
            raise dist.DistBackendError(str(error)) from error
        return work

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        opts = opts or dist.BroadcastOptions()
        if not self._has_memory_for(tensors):
            return self._over_gloo("broadcast", tensors, opts)
        make = functools.partial(Broadcast, values=_bytes(tensors[0]), root=opts.rootRank)
        return self._in_memory("broadcast", tensors, make, opts)

    def allgather(  # type: ignore[override]
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        if len({tensor.shape for tensor in outputs[0]}) > 1:  # gloo gathers equal shapes only
            outputs[0][self.rank()].copy_(inputs[0])
            return Works([self._broadcast(tensor, rank) for rank, tensor in enumerate(outputs[0])])
        if not (len(outputs) == 1 and self._has_memory_for(inputs, outputs[0])):
            return self._over_gloo("allgather", outputs, inputs, opts or AllgatherOptions())
        return self._gathered("allgather", inputs[0], outputs[0], outputs[0])

    def all_gather_single(self, output: torch.Tensor, own: torch.Tensor, opts: Any = None) -> dist.Work:
        parts = output.view(-1).chunk(self.size())
        if not self._has_memory_for([own], parts):
            return self._over_gloo("_allgather_base", output, own, opts or AllgatherOptions())
        return self._gathered("_allgather_base", own, parts, [output])

    _allgather_base = all_gather_single  # type: ignore[assignment]

    def reduce_scatter(  # type: ignore[override]
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None
    ) -> dist.Work:
        opts = opts or dist.ReduceScatterOptions()
        if not (len(inputs) == 1 and self._scatters(outputs, inputs[0], opts)):
            return self._over_gloo("reduce_scatter", outputs, inputs, opts)
        return self._scattered("reduce_scatter", outputs[0], inputs[0], inputs[0], opts)

    def reduce_scatter_single(self, output: torch.Tensor, whole: torch.Tensor, opts: Any = None) -> dist.Work:
        opts, parts = opts or dist.ReduceScatterOptions(), whole.view(-1).chunk(self.size())
        if not self._scatters([output], parts, opts):
            return self._over_gloo("_reduce_scatter_base", output, whole, opts)
        return self._scattered("_reduce_scatter_base", output, parts, [whole], opts)

    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]

    def _gathered(
        self, name: str, own: torch.Tensor, parts: Sequence[torch.Tensor], outputs: list[torch.Tensor]
    ) -> dist.Work:
        return self._in_memory(name, outputs, lambda end: Gather(end, _bytes(own), list(map(_bytes, parts))))

    def _scatters(self, outputs: list[torch.Tensor], parts: Sequence[torch.Tensor], opts: Any) -> bool:
        """Whether shared memory has this reduce_scatter."""
        return self._has_memory_for(outputs, parts) and is_sum(opts.reduceOp, outputs[0].dtype)

    def _scattered(
        self, name: str, output: torch.Tensor, parts: Sequence[torch.Tensor], inputs: list[torch.Tensor], opts: Any
    ) -> dist.Work:
        assert self.sums
        self.sums.bytes += output.nbytes * self.size()
        factor = 1.0 / self.size() if opts.reduceOp == dist.ReduceOp.AVG else 1.0
        values = [part.detach().view(-1).numpy() for part in parts]
        own = output.detach().view(-1).numpy()
        return self._in_memory(name, [output], lambda end: ScatteredSum(end, own, values, factor), opts, inputs)

    def _has_memory_for(self, own: list[torch.Tensor], parts: Sequence[torch.Tensor] | None = None) -> bool:
        """Whether the workers have shared memory for the one dense tensor `own` of each. `parts`: one like it for each
        worker; other ones are gloo's, which says what is wrong."""
        if not (self.sums and self.sums.host and len(own) == 1 and own[0].layout == torch.strided):
            return False
        like = own[0].numel(), own[0].dtype
        return parts is None or [(part.numel(), part.dtype) for part in parts] == [like] * self.size()

    def _in_memory(
        self,
        name: str,
        results: list[torch.Tensor],
        make: Callable[[End], Operation],
        opts: Any = None,
        shown: list[torch.Tensor] | None = None,
    ) -> dist.Work:
        """`opts` and `shown`: for messages, the latter the tensors if not the results."""
        assert self.sums and self.sums.host
        work = OwnWork(results)
        operation = make(work.end)

        def start(host: HostCollectives) -> OwnWork:
            host.start(operation)
            return work

        return self.own(described(NAMES[name], shown or results, opts), functools.partial(start, self.sums.host))

    def monitored_barrier(self, timeout: datetime.timedelta | None = None, wait_all_ranks: bool = False) -> None:
        limit = self.gloo.options._timeout if timeout is None else timeout
        self._explained(self._over.monitored_barrier, limit, wait_all_ranks)

    def abort(self) -> None:
        """What waits in this group fails; in a group with sums also everything of the job that waits for a server."""
        self.gloo.abort()
        if self.sums:
            self.sums.store.lose(f"worker {self.rank()} has aborted its process group")

    def _broadcast(self, tensor: torch.Tensor, source: int) -> dist.Work:
        options = dist.BroadcastOptions()
        options.rootRank = source
        return self.broadcast([tensor], options)

    def _over_gloo(self, name: str, *arguments: Any, **options: Any) -> dist.Work:
        opts = options.get("opts") or next(reversed(arguments), None)
        call = self.calls.begin(described(NAMES[name], list(tensors_of(arguments)), opts))
        return self._guarded(call, name, *arguments, **options)

    def _guarded(self, call: Call | None, name: str, *arguments: Any, **options: Any) -> dist.Work:
        work = self._explained(getattr(self._over, name), *arguments, **options)
        work = GlooWork(work, self._watch, alone=name in POINT_TO_POINT)
        if call:
            call.work = work
        return work

    def _explained(self, operation: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        try:
            return operation(*arguments, **options)
        except RuntimeError as error:  # wrong arguments, or gloo has been ended because of the reason
            raise (dist.DistBackendError(self._watch.reason) if self._watch.reason else error) from error


def _plain(store: Store, rank: int, size: int, gloo: Any, timeout: datetime.timedelta) -> dist.ProcessGroup:
    """A group with this backend alone, which has torch's checks if TORCH_DISTRIBUTED_DEBUG is DETAIL."""
    make: Any = dist.ProcessGroup
    group: dist.ProcessGroup = make(store, rank, size)
    if c10d.get_debug_level() == c10d.DebugLevel.DETAIL:
        gloo = c10d._create_process_group_wrapper(gloo, "dmltrain", store, rank, size, timeout)
    _register(group, gloo)
    return group


def _register(group: dist.ProcessGroup, gloo: Any) -> None:
    group._register_backend(CPU, dist.ProcessGroup.BackendType.GLOO, gloo)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)


def _bytes(tensor: torch.Tensor) -> Array:
    array: Array = tensor.detach().view(-1).view(torch.uint8).numpy()
    return array


def _options(address: str, timeout: datetime.timedelta) -> Any:
    make: Any = dist.ProcessGroupGloo
    options = make._Options()
    options._timeout = timeout
    options._devices = [make.create_device(hostname=address) if address else make.create_default_device()]
    return options


def _collective(name: str) -> Callable[..., dist.Work]:
    def operation(self: Group, *arguments: Any, **options: Any) -> dist.Work:
        return self._over_gloo(name, *arguments, **options)

    return operation


def _single(name: str) -> Callable[..., dist.Work]:
    def operation(self: Group, *arguments: Any, **options: Any) -> dist.Work:
        return self._guarded(None, name, *arguments, **options)

    return operation


for _name in OPERATIONS:
    setattr(Group, _name, _collective(_name))
for _name in POINT_TO_POINT:
    setattr(Group, _name, _single(_name))
for _name in (*NAMES, *POINT_TO_POINT):
    setattr(Group, _name, staged(_name, getattr(Group, _name)))
