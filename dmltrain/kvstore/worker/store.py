"""The interface of the distributed kvstores. membership.py has the worker's membership in the job, elastic_ops.py what
differs in an elastic one, transfers.py pushes and pulls, states.py the contents of checkpoints, limits.py the limits of
network and memory, present_kind.py changes of the kvstore.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dmltrain.base.arrays import Array
from dmltrain.base.env import Environment
from dmltrain.base.errors import UserError
from dmltrain.kvstore import types
from dmltrain.kvstore.base import Handle, Key, Keys, KVStore, keys_and_values, summed
from dmltrain.kvstore.encoded import Encoding
from dmltrain.kvstore.kind import KVStoreKind
from dmltrain.kvstore.scheduler.client import EXIT_SECONDS
from dmltrain.kvstore.transport import host
from dmltrain.kvstore.transport.message import encode
from dmltrain.kvstore.transport.message.data import Optimizer
from dmltrain.kvstore.transport.wire import FrameKind
from dmltrain.kvstore.waiting import StepTimer, Waits
from dmltrain.kvstore.worker import residual
from dmltrain.kvstore.worker.broadcast import Broadcast, by_sums
from dmltrain.kvstore.worker.elastic_membership import ElasticMembership
from dmltrain.kvstore.worker.elastic_ops import ElasticOps
from dmltrain.kvstore.worker.entry import cut
from dmltrain.kvstore.worker.gathering import Gathering
from dmltrain.kvstore.worker.keys import KeyEntries
from dmltrain.kvstore.worker.limits import Limits
from dmltrain.kvstore.worker.links.bound import Carried
from dmltrain.kvstore.worker.links.routes import Sharing, carried
from dmltrain.kvstore.worker.membership import Membership
from dmltrain.kvstore.worker.present_kind import PresentKind
from dmltrain.kvstore.worker.states import States
from dmltrain.kvstore.worker.transfers import Transfers


class DistKVStore(KVStore):
    """All distributed types. `staleness`: the bound, in clocks; see dmltrain.kvstore.create. In an elastic job `rank`
    and `num_workers` are this worker's place in its view, and the number of its members."""

    present = False  # whether this process has one already: at most one, because a process has one rank

    def __init__(
        self, kind: str, staleness: float, environment: Environment, exit_seconds: float = EXIT_SECONDS
    ) -> None:
        DistKVStore.present = True
        self.num_servers = environment.num_servers
        self.elastic = bool(environment.elastic)
        self._environment = environment
        self._staleness_taken = (0.0, 0)  # at the last take_staleness: sum and count
        type_, seconds = types.find(kind), environment.wait_seconds
        # In an elastic job a host's relay would be one more process that can be lost.
        sums = type_.sums_in_host and environment.num_workers > 1 and not self.elastic
        sharing = Sharing(environment, sums)
        join = ElasticMembership if self.elastic else Membership
        member = self._member = join(environment, sharing, exit_seconds)
        self._routes, self.start_message = member.routes, member.start_message
        apart, present = host.apart(self.start_message), KVStoreKind(type_, staleness)
        self._entries = KeyEntries(self._routes, self.num_workers, present, seconds, apart, can_undo=self.elastic)
        self._transfers = Transfers(member, self._entries, sharing.arena, seconds, flat_keys=not self.elastic)
        self._gathering = Gathering(member, self._entries, self._transfers, self.rank)
        self._broadcast = Broadcast(member, self._entries, self._transfers.pull, self.rank, seconds)
        self._arena = sharing.arena
        self._states = States(member, self._entries, self._transfers.all_reduce)
        self._limits = Limits(self, environment, member, self._entries)
        timer = StepTimer() if environment.reports_steps else None
        self._kind = PresentKind(kind, member, self._entries, self._transfers, timer)
        if isinstance(member, ElasticMembership):
            self.ops = ElasticOps(environment, member, self._entries, self._transfers, self._broadcast, self._kind)

    @property
    def type(self) -> str:  # type: ignore[override]
        return self._kind.name

    @property
    def kvstore_type(self) -> types.KVStoreType:
        return self._entries.kind.type

    @property
    def rank(self) -> int:  # type: ignore[override]
        return self._member.rank

    @property
    def num_workers(self) -> int:  # type: ignore[override]
        return self._member.num_workers

    @property
    def member(self) -> int:
        return self._environment.index

    @property
    def bytes_sent(self) -> int:  # type: ignore[override]
        return self._routes.sent_before + sum(carried(link)[0] for link in self._routes.all_links)

    @property
    def bytes_received(self) -> int:  # type: ignore[override]
        return self._routes.received_before + sum(carried(link)[1] for link in self._routes.all_links)

    @property
    def waits(self) -> Waits:  # type: ignore[override]
        return self._transfers.waits

    def init(
        self,
        key: Keys,
        value: Any,
        whole: bool = False,
        mean: bool = False,
        compression: dict[str, Any] | None = None,
        slice_bytes: int | None = None,
    ) -> None:
        """`compression`: of these keys, in place of that of `set_gradient_compression`. `slice_bytes`: of the parts in
        which servers hold them."""
        if self.ops.view:
            raise UserError("kvstore: an elastic job declares all keys before its first step")
        keys, values = keys_and_values(key, value)
        arrays = [summed(item) for item in values]
        slice_bytes = max(array.nbytes for array in arrays) if whole else slice_bytes
        if self.is_alone:  # the servers know the keys already
            return self._entries.declare(keys, arrays, True, slice_bytes, mean, compression, tell=False)
        self._limits.choose_shares()
        self._entries.declare(keys, arrays, True, slice_bytes, mean, compression)
        if self.rank == 0:
            for name, array in zip(keys, arrays, strict=True):
                for link, slice_ in self._routes.direct(self._entries.find(name).slices):
                    link.initialise(slice_, cut(array, slice_), self._environment.wait_seconds)
        self._member.flush()
        self.barrier()

    def push(self, key: Keys, value: Any, priority: int = 0, rate: float = -1.0) -> None:
        self._check_optimizer()
        self.ops.begin_step()
        self._transfers.push(key, value, priority, rate)
        self.pushed = time.perf_counter()

    def pull(self, key: Keys, out: Any, priority: int = 0, wait: bool = True) -> Handle:
        if self.is_alone:  # its values will come with the state of training
            return Handle(0, "pull", 0.0)
        self.ops.begin()
        handle = self._transfers.pull(key, out, priority)
        if wait:
            handle.wait()
        return handle

    def pushpull(
        self, key: Keys, value: Any, out: Any = None, priority: int = 0, wait: bool = True, rate: float = -1.0
    ) -> Handle:
        self._check_optimizer()
        self.ops.begin_round()
        handle = self._transfers.pushpull(key, value, out, priority, rate)
        if wait:
            handle.wait()
        self.pushed = time.perf_counter()
        return handle

    def _check_optimizer(self) -> None:
        """Raises UserError if a push needs an optimizer on the servers and there is none."""
        if not self._kind.stepping and self.kvstore_type.needs_server_optimizer:
            raise UserError(f"kvstore {self.type} runs the optimizer on the servers: call set_optimizer first")

    def buffers(self, keys: Sequence[Key]) -> list[Array]:
        return self._transfers.buffers(keys)

    def encodings(self, key: Key) -> Sequence[Encoding]:
        """A relay needs the gradients themselves."""
        entry = self._entries.find(key)
        arenas = {way.slice: way.link.link.own_arena for way in entry.ways}  # without servers that are lost
        if any(slice_.codec is None for slice_ in (*entry.slices, *arenas)):
            return ()
        return [slice_.encoding(arenas.get(slice_), lambda: self.ops.op) for slice_ in entry.slices]

    def shares(self, array: Array) -> bool:
        return self._arena is not None and self._arena.offset_of(array) is not None

    def init_gathered(self, keys: Sequence[Key], sizes: Sequence[int]) -> None:
        if not self.kvstore_type.synchronous:
            raise UserError(f"kvstore {self.type} gathers no values of all workers: use dist_sync")
        self._gathering.init(keys, sizes)

    def gather(self, keys: Sequence[Key], parts: Sequence[Array], priority: int = 0) -> Handle:
        return self._gathering.gather(keys, parts, priority)

    def link_rate(self) -> float | None:
        return self._limits.link_rate()

    def wire_ratio(self, elements: int) -> float:
        return self._entries.ratio(elements)

    def set_gradient_compression(self, parameters: dict[str, Any]) -> None:
        self._entries.compress(parameters)

    def barrier(self) -> None:
        if not self.is_alone:
            self.ops.run("a barrier", self._transfers.barrier)

    def confirm(self) -> None:
        self._member.confirm()

    def all_reduce(self, name: str, array: Array) -> Array:
        values = np.array(array, np.float64)
        if not self.is_alone:
            self.ops.run(f"the sum of {name}", lambda: self._transfers.all_reduce(name, values), has_barrier=False)
        return values

    def broadcast(self, values: Array, needed: bool = True, source: int = 0) -> None:
        if self.ops.view:
            by_sums(self.all_reduce, values, needed, self.rank == source)
        elif not self.is_alone:
            self._broadcast(values, needed, source)

    def set_optimizer(self, spec: dict[str, Any]) -> None:
        if self._entries.shares is not None:
            raise UserError("server shares by links need the optimizer on the workers: do not set update_on_kvstore")
        self.ops.set_optimizer(spec)
        if not self.is_alone:  # else the servers run it already
            self._states.tell_servers(encode(Optimizer(spec)))
        self._kind.stepping = True
        self.barrier()

    def follow_changes(self, keys: Sequence[Key], refusal: Callable[[types.KVStoreType], str]) -> None:
        self._kind.follow(keys, refusal)

    def between_steps(self, settle: Callable[[], None]) -> bool:
        return self._kind.between_steps(settle)

    def key_number(self, key: Key) -> int:
        return self._entries.find(key).number

    def factor_to_mean(self, key: Key) -> float:
        return 1.0 if self._entries.find(key).mean else 1.0 / self.num_workers

    def optimizer_states(self) -> list[bytearray]:
        return self._member.answers(FrameKind.READ_STATE)

    def load_optimizer_state_bytes(self, states: Sequence[bytes]) -> None:
        self._states.load_servers(states)

    def residuals(self) -> dict[str, Array]:
        return self._states.residuals(of_servers=not self._kind.stepping)

    def load_residuals(self, residuals: dict[str, Array]) -> None:
        self._states.load_residuals(residuals, of_servers=not self._kind.stepping)

    def residuals_of(self, keys: Sequence[Key]) -> list[Array]:
        """This worker's residuals of these keys, flat, and in those of worker 0 also the servers'. Any worker may call
        it alone, while it has no push under way."""
        return self._states.residuals_of(keys)

    def add_residual(self, key: Key, values: Array) -> None:
        """Add what `residuals_of` returned to this worker's residual of a key, before its first push."""
        residual.add(residual.slices_with_residual([self._entries.find(key)]), values)

    def take_staleness(self) -> float:
        total = float(sum(link.traffic.staleness for link in self._routes.links))
        count = sum(link.traffic.values for link in self._routes.links)
        before, self._staleness_taken = self._staleness_taken, (total, count)
        mean: float = (total - before[0]) / max(1, count - before[1])
        return mean

    def measure_limits(self) -> str:
        return self._limits.measure()

    def carried(self) -> Carried | None:
        return self._limits.bound.carried() if self._limits.bound else None

    def bound(self, carried: Carried, took: float) -> float:
        return self._limits.bound.seconds(carried, took) if self._limits.bound else 0.0

    def abort(self, reason: str) -> None:
        self._member.abort(reason)

    def failed(self, error: BaseException) -> None:
        if not self.ops.drops_out(error):
            super().failed(error)

    def lose(self, reason: str) -> None:
        """End the job for all processes, also for this one if its main thread is waiting. Other threads call this."""
        self._member.lose(reason)

    def lost_within(self, seconds: float) -> str:
        """Why the job was lost, waiting for at most `seconds`; "" if it is not."""
        return self._member.lost_within(seconds)

    def close(self) -> None:
        self._member.close()
