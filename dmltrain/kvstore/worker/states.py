"""The kvstore's part of a checkpoint: the servers' states and the residuals of gradient compression."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from dmltrain.base import npz
from dmltrain.base.arrays import Array
from dmltrain.kvstore.base import Key
from dmltrain.kvstore.transport.wire import FrameKind, Header
from dmltrain.kvstore.worker import resharding, residual
from dmltrain.kvstore.worker.keys import KeyEntries
from dmltrain.kvstore.worker.links.worker_slice import WorkerSlice
from dmltrain.kvstore.worker.membership import Membership

SumUp = Callable[[str, Array], None]  # replaces an array by the sum of all workers' arrays


class States:
    """Every worker must call `residuals`, `load_residuals` and `load_servers`."""

    def __init__(self, member: Membership, entries: KeyEntries, sum_up: SumUp) -> None:
        self._member, self._entries, self._sum_up = member, entries, sum_up

    def load_servers(self, states: Sequence[bytes], residuals: bool = False) -> None:
        """`states`: of all servers of the job that saved them, of which there may have been more or fewer. With
        `residuals` nothing else in them matters. Raises UserError."""
        self._member.barrier()  # before it, a slower worker may still have to pull the initial weights
        if self._member.rank == 0:
            ranges = [slice_.range for entry in self._entries if entry.is_weight for slice_ in entry.slices]
            servers = self._member.routes.servers
            fitting = resharding.fit(states, ranges, len(servers), residuals)
            for server, state in zip(servers, fitting, strict=True):
                self._member.request(server, Header(FrameKind.STATE, len(state), server.view).pack() + state).wait()
        self._member.barrier()
        for entry in self._entries:
            entry.unpushed = True

    def tell_servers(self, frame: bytes) -> None:
        """Worker 0 sends all servers this frame, and waits for their answers."""
        if self._member.rank == 0:
            for handle in [self._member.request(server, frame) for server in self._member.routes.servers]:
                handle.wait()

    def residuals(self, of_servers: bool) -> dict[str, Array]:
        """On worker 0, by owner; with `of_servers` including those of the servers."""
        slices = residual.slices_with_residual(self._entries)
        if not slices:
            return {}
        own = residual.gathered(slices)
        by_owner = {}
        for worker in range(self._member.num_workers):  # one at a time: each sum uses the memory of one
            values = own.copy() if worker == self._member.rank else np.zeros_like(own)
            self._sum_up("residuals", values)
            if self._member.rank == 0:
                by_owner[f"worker {worker}"] = values
        if self._member.rank == 0 and of_servers:
            states = self._member.answers(FrameKind.READ_STATE)
            by_owner |= {f"server {number}": np.frombuffer(state, np.uint8) for number, state in enumerate(states)}
        return by_owner

    def residuals_of(self, keys: Sequence[Key]) -> list[Array]:
        """See DistKVStore.residuals_of."""
        slices = [residual.slices_with_residual([self._entries.find(key)]) for key in keys]
        own = [residual.gathered(each) if each else np.zeros(0, np.float32) for each in slices]
        if self._member.rank == 0 and any(slices):
            held: dict[str, Array] = {}
            for state in self._member.answers(FrameKind.READ_STATE):
                held |= npz.read(state)
            for values, each in zip(own, slices, strict=True):
                values += np.concatenate([held[f"{slice_.range.key}/{slice_.range.index}/residual"] for slice_ in each])
        return own

    def load_residuals(self, residuals: dict[str, Array], of_servers: bool) -> None:
        slices = residual.slices_with_residual(self._entries)
        workers = [array for name, array in residuals.items() if name.startswith("worker ")]
        servers = [array for name, array in residuals.items() if name.startswith("server ")]
        if not slices:
            return
        residual.spread(slices, workers, lambda slice_: self._owned(slice_, len(workers)))
        if servers and of_servers:
            self.load_servers([array.tobytes() for array in servers], residuals=True)

    def _owned(self, slice_: WorkerSlice, workers: int) -> Iterable[int]:
        """The saved workers whose residuals of a slice this worker takes over, of `workers` in all."""
        if workers == self._member.num_workers:
            return self._member.routes.keeps(slice_.range.server)
        return range(workers) if self._member.rank == 0 else ()
