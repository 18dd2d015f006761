"""What the network and the hosts' memory carry, as measured before training, and the servers' shares that follow."""

from __future__ import annotations

import numpy as np

from dmltrain.base.env import Environment
from dmltrain.base.errors import UserError
from dmltrain.kvstore import types
from dmltrain.kvstore.base import KVStore
from dmltrain.kvstore.worker.keys import KeyEntries
from dmltrain.kvstore.worker.links.bound import Bound
from dmltrain.kvstore.worker.links.sharding import shares
from dmltrain.kvstore.worker.membership import Membership


class Limits:
    """`bound`: of the time of this host's traffic, once it is measured. In an elastic job nothing is measured: it would
    be about the links at the start, and links change with views."""

    def __init__(self, store: KVStore, environment: Environment, member: Membership, entries: KeyEntries) -> None:
        self._store, self._environment, self._member, self._entries = store, environment, member, entries
        self._hosts = [
            worker.host_id or f"of worker {rank}" for rank, worker in enumerate(member.start_message.workers)
        ]
        self.bound: Bound | None = None

    def measure(self) -> str:
        """See KVStore.measure_limits."""
        if not self._environment.probe or self._store.elastic:
            return ""
        if self.bound:
            return ", ".join([str(self.bound), *self._shares_chosen()])
        routes = self._member.routes
        hosts = [*self._hosts, *(server.host_id for server in self._member.start_message.servers)]
        upstream = routes.relay.links if routes.relay else {}
        self.bound = Bound(self._store, routes.servers, routes.host, upstream, hosts)
        return str(self.bound)

    def link_rate(self) -> float | None:
        """See KVStore.link_rate."""
        return float(self.bound.network[0]) if self.bound else None

    def choose_shares(self) -> None:
        """Choose the servers' shares before the first weights are declared. Raises UserError."""
        if self._environment.server_shares != "links" or self._entries.shares is not None:
            return
        if not self._entries.kind.type.synchronous or self._entries.has_residuals:
            able = " or ".join(types.names(lambda type_: type_.distributed and type_.synchronous))
            raise UserError(
                f"server shares by links need {able}, and gradient compression none, bf16 or fp16: checkpoints of "
                "servers could not be loaded after a measurement with another result"
            )
        if not self._environment.probe:
            raise UserError("server shares by links need a measurement of the network: leave DMLTRAIN_PROBE=0 out")
        self.measure()
        rates = np.zeros(self._store.num_workers)
        rates[self._store.rank] = self.link_rate() or 0.0
        rates = self._store.all_reduce("rates of links", rates)
        addresses = self._member.start_message.servers
        servers = [server.host_id or f"of server {number}" for number, server in enumerate(addresses)]
        self._entries.shares = shares(self._hosts, servers, dict(zip(self._hosts, rates.tolist(), strict=True)))

    def _shares_chosen(self) -> list[str]:
        if self._entries.shares is None:
            return []
        return [f"servers hold {', '.join(f'{100 * share:.0f}' for share in self._entries.shares)} % of the weights"]
