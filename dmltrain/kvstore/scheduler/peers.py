"""The processes that have registered with the scheduler: where each is, and whether it is still there. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dmltrain.kvstore.scheduler.lost_links import Node
from dmltrain.kvstore.transport.message import Register, ServerAddress, Start, WorkerAddress


@dataclass
class Peer:
    registration: Register
    heard: float  # s
    done: bool = False  # its worker has finished
    left: bool = False  # and nothing is left of it that could be lost


class Peers(dict[Node, Peer]):
    def done(self, node: Node) -> bool:
        return node in self and self[node].done

    def host(self, node: Node) -> Node | str:
        """What is equal for processes of one host."""
        peer = self.get(node)
        return peer.registration.host_id or node if peer else node

    def hosts(self, ranks: int) -> list[tuple[int, ...]]:
        """The workers that have registered with ranks below this, by host."""
        hosts: dict[Node | str, list[int]] = {}
        for rank in range(ranks):
            if ("worker", rank) in self:
                hosts.setdefault(self.host(("worker", rank)), []).append(rank)
        return [tuple(host) for host in hosts.values()]

    def describe(self, node: Node) -> str:
        """With its host, for messages."""
        host = self[node].registration.host_name or self[node].registration.host
        return f"{name_of(node)} on {host}" if host else name_of(node)

    def address(self, server: int) -> ServerAddress:
        its = self["server", server].registration
        return ServerAddress(its.host, its.port, its.socket_name, its.host_id, its.host_name)

    def start(self, workers: int, servers: int, facts: Mapping[str, Any]) -> Start:
        """What all are told when so many have registered."""
        registered = [self["worker", number].registration for number in range(workers)]
        return Start(
            tuple(self.address(number) for number in range(servers)),
            tuple(WorkerAddress(each.socket_name, each.host_id, each.host_name) for each in registered),
            dict(facts),
        )


def name_of(node: Node) -> str:
    return f"{node[0]} {node[1]}"
