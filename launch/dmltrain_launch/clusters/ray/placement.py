"""What a job asks of Ray, and what a cluster can give. Pure; nothing of Ray is imported here."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dmltrain_launch import LaunchError
from dmltrain_launch.job.host import natural

STRICT_SPREAD = "STRICT_SPREAD"
STRATEGIES = {
    STRICT_SPREAD: "each bundle on another node",
    "SPREAD": "on as many nodes as there is room",
    "PACK": "on as few nodes as there is room",
    "STRICT_PACK": "all on one node",
}
Bundle = dict[str, float]  # resources by Ray's names
BYTES = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
SPELLINGS = {"cpu": "CPU", "cpus": "CPU", "gpu": "GPU", "gpus": "GPU"}
PINNED = 0.001  # of node:IP, of which each node has 1: the bundle goes to that node
SHOWN_NODES = 8
EXAMPLE = "CPU=8,GPU=2,memory=16g"


@dataclass(frozen=True)
class Node:
    """A living node of a cluster. `total`: its resources by Ray's names, `memory` in bytes."""

    id: str
    host: str  # its host's name
    ip: str
    total: Mapping[str, float]

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Node:
        """From a row of `ray.nodes()`."""
        return cls(row["NodeID"], row["NodeManagerHostname"], row["NodeManagerAddress"], dict(row["Resources"]))

    def has(self, bundle: Mapping[str, float]) -> bool:
        return all(self.total.get(name, 0.0) >= amount for name, amount in bundle.items())


@dataclass(frozen=True)
class Request:
    """What the launcher asks the driver for. `hosts`: names of nodes, one for each bundle; [] leaves them to Ray.
    `bundle`: for a node that comes later. `wait` in s, None: as long as the cluster could ever take it. Without bundles
    nothing is placed. `starts`: with actors, else only the group."""

    address: str
    name: str
    bundle: Bundle
    bundles: list[Bundle] = field(default_factory=list)
    strategy: str = STRICT_SPREAD
    hosts: list[str] = field(default_factory=list)
    runtime_env: dict[str, Any] = field(default_factory=dict)
    wait: float | None = None
    starts: bool = True


def listing() -> str:
    """The strategies as text, for --help."""
    return ", ".join(f"{name} ({meaning})" for name, meaning in STRATEGIES.items())


def resources(text: str) -> Bundle:
    """From a text such as EXAMPLE; memory in bytes. Without CPU it is one. LaunchError if it is wrong."""
    bundle: Bundle = {}
    for part in text.split(","):
        name, equals, value = (each.strip() for each in part.partition("="))
        name = SPELLINGS.get(name.lower(), name)
        if not name or not equals or name in bundle:
            raise LaunchError(f"{part!r}: expected NAME=AMOUNT, each name once, such as {EXAMPLE}")
        bundle[name] = _amount(name, value)
    return {"CPU": 1.0, **bundle}


def _amount(name: str, value: str) -> float:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]*)?)([kmgt]?)", value.lower())
    if not match or (match[2] and name not in ("memory", "object_store_memory")):
        unit = ", for memory in bytes or with k, m, g or t" if "memory" in name else ""
        raise LaunchError(f"{name}={value}: expected a number, 0 or more{unit}, such as {EXAMPLE}")
    amount = float(match[1]) * BYTES.get(match[2], 1)
    if name == "GPU" and amount > 1 and amount != int(amount):
        raise LaunchError(f"{name}={value}: expected a whole number, or a part of one GPU")
    return amount


def names(nodes: Sequence[Node]) -> dict[str, Node]:
    """The nodes by the names that hosts have here: the host's name, with a part of the node's id if two share it."""
    twice = Counter(node.host for node in nodes)
    named = [(node.host if twice[node.host] == 1 else f"{node.host}-{node.id[:8]}", node) for node in nodes]
    return dict(sorted(named, key=lambda pair: natural(pair[0])))


def find(name: str, nodes: Mapping[str, Node]) -> Node:
    """The node of that name or IP address; LaunchError if there is none."""
    for each, node in nodes.items():
        if name in (each, node.ip):
            return node
    raise LaunchError(f"{name} is not a node of the Ray cluster, which has {', '.join(nodes) or 'none'}")


def pinned(bundle: Bundle, node: Node) -> Bundle:
    """The same, on that node only."""
    return {**bundle, f"node:{node.ip}": PINNED}


def lacking(bundles: Sequence[Bundle], strategy: str, nodes: Sequence[Node]) -> str:
    """Why this cluster can never place the bundles, even when all of it is free; "" if no reason is seen here."""
    for bundle in bundles:
        if not any(node.has(bundle) for node in nodes):
            return f"no node has {text_of(bundle)}"
    able = [node for node in nodes if any(node.has(bundle) for bundle in bundles)]
    if strategy == STRICT_SPREAD and len(able) < len(bundles):
        each = f" with {text_of(bundles[0])}" if all(bundle == bundles[0] for bundle in bundles) else ""
        return f"only {len(able)} of its nodes can take one of the {len(bundles)} bundles{each}"
    return ""


def inventory(nodes: Mapping[str, Node], bundles: Sequence[Bundle]) -> str:
    """What the nodes have of what the bundles ask for."""
    asked = dict.fromkeys(name for bundle in bundles for name in bundle if not name.startswith("node:"))
    rows = [
        f"{name} ({text_of({each: node.total.get(each, 0.0) for each in asked})})"
        for name, node in list(nodes.items())[:SHOWN_NODES]
    ]
    more = [f"and {len(nodes) - SHOWN_NODES} more"] if len(nodes) > SHOWN_NODES else []
    return ", ".join([*rows, *more]) or "no nodes"


def text_of(bundle: Mapping[str, float]) -> str:
    """A bundle as the user writes it."""
    return " ".join(f"{name}={_shown(name, amount)}" for name, amount in bundle.items())


def _shown(name: str, amount: float) -> str:
    if "memory" in name and amount >= BYTES["m"]:
        return f"{math.floor(amount / BYTES['m'])}m"
    return f"{amount:g}"


def described(bundles: Sequence[Bundle], strategy: str) -> str:
    """The request in Ray's own words."""
    return f"placement_group({[dict(bundle) for bundle in bundles]}, strategy={strategy!r})"
