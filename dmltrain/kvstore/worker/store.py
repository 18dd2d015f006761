"""The interface of the distributed kvstores. membership.py has the worker's membership in the job, transfers.py pushes
and pulls, states.py the contents of checkpoints, bound.py the limits of network and memory.
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
from dmltrain.kvstore.kind import KVStoreKind
from dmltrain.kvstore.log import log
from dmltrain.kvstore.scheduler.client import EXIT_SECONDS
from dmltrain.kvstore.transport import host
from dmltrain.kvstore.transport.message import Change, Optimizer, encode
from dmltrain.kvstore.waiting import StepTimer, Waits
from dmltrain.kvstore.worker import changes
from dmltrain.kvstore.worker.broadcast import Broadcast
from dmltrain.kvstore.worker.changes import UNKNOWN
from dmltrain.kvstore.worker.entry import cut
from dmltrain.kvstore.worker.gathering import Gathering
from dmltrain.kvstore.worker.keys import KeyEntries
from dmltrain.kvstore.worker.links.bound import Bound, Carried
from dmltrain.kvstore.worker.links.routes import Sharing, carried
from dmltrain.kvstore.worker.links.sharding import shares
from dmltrain.kvstore.worker.membership import Membership
from dmltrain.kvstore.worker.states import States
from dmltrain.kvstore.worker.transfers import Transfers


class DistKVStore(KVStore):
    """All distributed types. `staleness`: the bound, in clocks; see dmltrain.kvstore.create."""

    present = False  # whether this process has one already: at most one, because a process has one rank
    sums_in_host = True  # whether a relay may sum inside a host, if the kvstore's type permits it
    flat_keys = True  # whether keys may be pushed and pulled as one

    def __init__(
        self, kind: str, staleness: float, environment: Environment, exit_seconds: float = EXIT_SECONDS
    ) -> None:
        DistKVStore.present = True
        self.type = kind
        self.rank, self.num_workers = environment.index, environment.num_workers
        self.num_servers = environment.num_servers
        self._environment = environment
        self._staleness_taken = (0.0, 0)  # at the last take_staleness: sum and count
        self._stepping = False
        self._bound: Bound | None = None
        self._steps = StepTimer() if environment.reports_steps else None
        sums = self.sums_in_host and self.kvstore_type.sums_in_host and environment.num_workers > 1
        sharing = Sharing(environment, sums)
        self._member = self._join(environment, sharing, exit_seconds)
        self._routes, self.start_message = self._member.routes, self._member.start_message
        seconds = environment.wait_seconds
        apart = host.apart(self.start_message)
        self._entries = KeyEntries(
            self._routes, self.num_workers, self.kvstore_type.name, staleness, seconds, apart, self.keeps_gradients
        )
        synchronous = self.kvstore_type.synchronous
        self._transfers = Transfers(self._member, self._entries, sharing.arena, synchronous, seconds, self.flat_keys)
        self._gathering = Gathering(self._member, self._entries, self._transfers, self.rank)
        self._broadcast = Broadcast(self._member, self._entries, self._transfers.pull, self.rank, seconds)
        self._states = States(
            self._member, self._entries, self._transfers.all_reduce, self.rank, self.num_workers, seconds
        )

    def _join(self, environment: Environment, sharing: Sharing, exit_seconds: float) -> Membership:
        return Membership(environment, sharing, exit_seconds)

    @property
    def bytes_sent(self) -> int:  # type: ignore[override]
        return self._routes.sent_before + sum(carried(link)[0] for link in self._routes.all_links)

    @property
    def bytes_received(self) -> int:  # type: ignore[override]
        return self._routes.received_before + sum(carried(link)[1] for link in self._routes.all_links)

    @property
    def waits(self) -> Waits:  # type: ignore[override]
        return self._transfers.waits

    def init(self, key: Keys, value: Any, whole: bool = False, mean: bool = False) -> None:
        keys, values = keys_and_values(key, value)
        arrays = [summed(item) for item in values]
        self._choose_shares()
        self._entries.declare(keys, arrays, is_weight=True, whole=whole, mean=mean)
        if self.rank == 0:
            for name, array in zip(keys, arrays, strict=True):
                for link, slice_ in self._routes.direct(self._entries.find(name).slices):
                    link.initialise(slice_, cut(array, slice_), self._environment.wait_seconds)
        self._member.flush()
        self.barrier()

    def push(self, key: Keys, value: Any, priority: int = 0, rate: float = -1.0) -> None:
        check_optimizer(self, self._stepping)
        self._transfers.push(key, value, priority, rate)

    def pull(self, key: Keys, out: Any, priority: int = 0, wait: bool = True) -> Handle:
        handle = self._transfers.pull(key, out, priority)
        if wait:
            handle.wait()
        return handle

    def pushpull(
        self, key: Keys, value: Any, out: Any = None, priority: int = 0, wait: bool = True, rate: float = -1.0
    ) -> Handle:
        check_optimizer(self, self._stepping)
        handle = self._transfers.pushpull(key, value, out, priority, rate)
        if wait:
            handle.wait()
        return handle

    def buffers(self, keys: Sequence[Key]) -> list[Array]:
        return self._transfers.buffers(keys)

    def init_gathered(self, keys: Sequence[Key], sizes: Sequence[int]) -> None:
        if not self.kvstore_type.synchronous:
            raise UserError(f"kvstore {self.type} gathers no values of all workers: use dist_sync")
        self._gathering.init(keys, sizes)

    def gather(self, keys: Sequence[Key], parts: Sequence[Array], priority: int = 0) -> Handle:
        return self._gathering.gather(keys, parts, priority)

    def link_rate(self) -> float | None:
        return float(self._bound.network[0]) if self._bound else None

    def wire_ratio(self, elements: int) -> float:
        return self._entries.ratio(elements)

    def set_gradient_compression(self, parameters: dict[str, Any]) -> None:
        self._entries.compress(parameters)

    def barrier(self) -> None:
        self._transfers.barrier()

    def all_reduce(self, name: str, array: Array) -> Array:
        values = np.array(array, np.float64)
        self._transfers.all_reduce(name, values)
        return values

    def broadcast(self, values: Array, needed: bool = True, source: int = 0) -> None:
        self._broadcast(values, needed, source)

    def set_optimizer(self, spec: dict[str, Any]) -> None:
        if self._entries.shares is not None:
            raise UserError("server shares by links need the optimizer on the workers: do not set update_on_kvstore")
        self._states.tell_servers(encode(Optimizer(spec)))
        self._stepping = True
        self.barrier()

    def follow_changes(self, keys: Sequence[Key], refusal: Callable[[types.KVStoreType], str]) -> None:
        self._member.changes.follow(lambda change: self._why_not(change, len(keys), refusal))

    def between_steps(self, settle: Callable[[], None]) -> bool:
        self._report_step()
        change = self._member.due_change()
        if change is None:
            return False
        before, wanted = self._kind, self._kind.changed(change.kv_store, change.staleness)
        settle()
        self._member.wait_for_servers(change)  # all pushes are in the weights, and all workers have their values
        self._become(wanted)
        self._transfers.change(wanted.type.synchronous)
        log(f"after step {change.after} of this job: {wanted} (before: {before}); asked for by {change.by}")
        return True

    def _report_step(self) -> None:
        """A step has been made. If the job has rules, report from time to time how long this worker computes in one."""
        if self._steps and (seconds := self._steps.made(time.perf_counter(), self.waits.total)):
            self._member.took(seconds)

    @property
    def _kind(self) -> KVStoreKind:
        return KVStoreKind(self.kvstore_type, self._entries.staleness)

    def _become(self, kind: KVStoreKind) -> None:
        """From now on the kvstore is of this kind. The servers know it already."""
        self.type = self._entries.kind = kind.type.name
        self._entries.staleness = kind.staleness

    def _why_not(self, change: Change, keys: int, refusal: Callable[[types.KVStoreType], str]) -> str:
        """Why the kvstore cannot change; empty if it can. On the control thread."""
        if not self._stepping or keys != sum(entry.is_weight for entry in list(self._entries)):
            return UNKNOWN
        now, routes = self._kind, self._routes
        fixed = changes.why_fixed(self._entries.compresses, bool(routes.relay or routes.host))
        why = now.refusal(change.kv_store, change.staleness, fixed)
        return why or refusal(now.changed(change.kv_store, change.staleness).type)

    def key_number(self, key: Key) -> int:
        return self._entries.find(key).number

    def factor_to_mean(self, key: Key) -> float:
        return 1.0 if self._entries.find(key).mean else 1.0 / self.num_workers

    def optimizer_states(self) -> list[bytearray]:
        return self._states.of_servers()

    def load_optimizer_state_bytes(self, states: Sequence[bytes]) -> None:
        self._states.load_servers(states)

    def residuals(self) -> dict[str, Array]:
        return self._states.residuals(of_servers=not self._stepping)

    def load_residuals(self, residuals: dict[str, Array]) -> None:
        self._states.load_residuals(residuals, of_servers=not self._stepping)

    def take_staleness(self) -> float:
        total = float(sum(link.traffic.staleness for link in self._routes.links))
        count = sum(link.traffic.values for link in self._routes.links)
        before, self._staleness_taken = self._staleness_taken, (total, count)
        mean: float = (total - before[0]) / max(1, count - before[1])
        return mean

    def _choose_shares(self) -> None:
        """Choose the servers' shares before the first weights are declared."""
        if self._environment.server_shares != "links" or self._entries.shares is not None:
            return
        if not self.kvstore_type.synchronous or self._entries.has_residuals:
            able = " or ".join(types.names(lambda type_: type_.distributed and type_.synchronous))
            raise UserError(
                f"server shares by links need {able}, and gradient compression none, bf16 or fp16: checkpoints of "
                "servers could not be loaded after a measurement with another result"
            )
        if not self._environment.probe:
            raise UserError("server shares by links need a measurement of the network: leave DMLTRAIN_PROBE=0 out")
        self.measure_limits()
        rates = np.zeros(self.num_workers)
        rates[self.rank] = self.link_rate() or 0.0
        rates = self.all_reduce("rates of links", rates)
        workers = [worker.host_id or f"of worker {rank}" for rank, worker in enumerate(self.start_message.workers)]
        servers = [server.host_id or f"of server {number}" for number, server in enumerate(self.start_message.servers)]
        self._entries.shares = shares(workers, servers, dict(zip(workers, rates.tolist(), strict=True)))

    def measure_limits(self) -> str:
        if not self._environment.probe:
            return ""
        if self._bound:
            return ", ".join([str(self._bound), *self._shares_chosen()])
        routes = self._routes
        hosts = [worker.host_id or f"of worker {rank}" for rank, worker in enumerate(self.start_message.workers)]
        hosts += [server.host_id for server in self.start_message.servers]
        upstream = routes.relay.links if routes.relay else {}
        self._bound = Bound(self, routes.servers, routes.host, upstream, hosts)
        return str(self._bound)

    def _shares_chosen(self) -> list[str]:
        if self._entries.shares is None:
            return []
        return [f"servers hold {', '.join(f'{100 * share:.0f}' for share in self._entries.shares)} % of the weights"]

    def carried(self) -> Carried | None:
        return self._bound.carried() if self._bound else None

    def bound(self, carried: Carried, took: float) -> float:
        return self._bound.seconds(carried, took) if self._bound else 0.0

    def abort(self, reason: str) -> None:
        self._member.abort(reason)

    def lose(self, reason: str) -> None:
        """End the job for all processes, also for this one if its main thread is waiting. Other threads call this."""
        self._member.lose(reason)

    def close(self) -> None:
        self._member.close()


def check_optimizer(store: KVStore, is_set: bool) -> None:
    """Raises UserError if a push needs an optimizer on the servers and there is none."""
    if store.kvstore_type.needs_server_optimizer and not is_set:
        raise UserError(f"kvstore {store.type} runs the optimizer on the servers: call set_optimizer first")
