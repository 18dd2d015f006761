"""The kvstore's part of a checkpoint: the servers' states and the residuals of gradient compression."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from dmltrain.base.arrays import Array
from dmltrain.kvstore.base import Handle
from dmltrain.kvstore.transport.wire import FrameKind, Header
from dmltrain.kvstore.worker import resharding, residual
from dmltrain.kvstore.worker.keys import KeyEntries
from dmltrain.kvstore.worker.links.server_link import ServerLink
from dmltrain.kvstore.worker.links.worker_slice import WorkerSlice
from dmltrain.kvstore.worker.membership import Membership

SumUp = Callable[[str, Array], None]  # replaces an array by the sum of all workers' arrays


class States:
    """Every worker must call `residuals`, `load_residuals` and `load_servers`."""

    def __init__(
        self, member: Membership, entries: KeyEntries, sum_up: SumUp, rank: int, num_workers: int, seconds: float
    ) -> None:
        self._member, self._entries, self._sum_up = member, entries, sum_up
        self._rank, self._num_workers, self._seconds = rank, num_workers, seconds

    def enter(self, rank: int, num_workers: int) -> None:
        """The members of an elastic job have changed."""
        self._rank, self._num_workers = rank, num_workers

    @property
    def _servers(self) -> Sequence[ServerLink]:
        return self._member.routes.servers

    def of_servers(self) -> list[bytearray]:
        answers: list[list[bytearray]] = [[] for _ in self._servers]
        for server, answer in zip(self._servers, answers, strict=True):
            self._request(server, Header(FrameKind.READ_STATE, 0, server.view).pack(), answer).wait()
        return [answer[0] for answer in answers]

    def load_servers(self, states: Sequence[bytes], residuals: bool = False) -> None:
        """`states`: of all servers of the job that saved them, of which there may have been more or fewer. With
        `residuals` nothing else in them matters. Raises UserError."""
        self._member.barrier()  # before it, a slower worker may still have to pull the initial weights
        if self._rank == 0:
            ranges = [slice_.range for entry in self._entries if entry.is_weight for slice_ in entry.slices]
            fitting = resharding.fit(states, ranges, len(self._servers), residuals)
            for server, state in zip(self._servers, fitting, strict=True):
                self._request(server, Header(FrameKind.STATE, len(state), server.view).pack() + state).wait()
        self._member.barrier()
        for entry in self._entries:
            entry.unpushed = True

    def tell_servers(self, frame: bytes) -> None:
        """Worker 0 sends all servers this frame, and waits for their answers."""
        if self._rank == 0:
            for handle in [self._request(server, frame) for server in self._servers]:
                handle.wait()

    def residuals(self, of_servers: bool) -> dict[str, Array]:
        """On worker 0, by owner; with `of_servers` including those of the servers."""
        slices = residual.slices_with_residual(self._entries)
        if not slices:
            return {}
        own = residual.gathered(slices)
        by_owner = {}
        for worker in range(self._num_workers):  # one at a time: each sum uses the memory of one
            values = own.copy() if worker == self._rank else np.zeros_like(own)
            self._sum_up("residuals", values)
            if self._rank == 0:
                by_owner[f"worker {worker}"] = values
        if self._rank == 0 and of_servers:
            states = self.of_servers()
            by_owner |= {f"server {number}": np.frombuffer(state, np.uint8) for number, state in enumerate(states)}
        return by_owner

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
        if workers == self._num_workers:
            return self._member.routes.keeps(slice_.range.server)
        return range(workers) if self._rank == 0 else ()

    def _request(self, server: ServerLink, frame: bytes, answer: list[bytearray] | None = None) -> Handle:
        return self._member.watched(server.request(frame, self._seconds, answer))
