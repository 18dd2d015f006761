"""Reads MXNet's graphs (PREFIX-symbol.json of save_checkpoint, gluon's export, Symbol.save) of versions 0.5 to 1.9.

A file is JSON text: `nodes` in an order in which inputs come first, and `heads`, the outputs. Each node has `op`
("null" for a variable), `name`, `inputs` (pairs or triples: node, number of its output, version), and the operator's
options as text. Their key has been "param" (before 0.9, where "attr" has the user's own attributes), "attr" (0.9 to
0.12) and "attrs" (since 1.0). MXNet's reader is 3rdparty/tvm/nnvm/src/pass/saveload_json.cc.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dmltrain.base import bounded
from dmltrain.base.errors import UserError

MAX_BYTES = 16 << 20  # MXNet's inception-resnet-v2 has 0.4 MiB
MAX_NODES = 50_000  # and 2,332 nodes
MAX_NAME = 200  # characters
VARIABLE = "null"


@dataclass(frozen=True)
class Node:
    """`inputs` are places in Graph.nodes, all below the node's own."""

    op: str
    name: str
    options: Mapping[str, str]
    inputs: tuple[int, ...]

    @property
    def is_variable(self) -> bool:
        return self.op == VARIABLE

    @property
    def label(self) -> str:
        return f"node {self.name!r} ({self.op})"


@dataclass(frozen=True)
class Graph:
    """`oldest`: written before version 0.9, with all options of an operator and without its auxiliary states."""

    nodes: tuple[Node, ...]
    heads: tuple[int, ...]
    oldest: bool = False


def read(source: Path) -> Graph:
    """Raises UserError for another file, and one that is damaged or too large."""
    try:
        return parse(bounded.read(source, MAX_BYTES))
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise UserError(
            f"cannot read the graph in {source}: {reason}; expected PREFIX-symbol.json of MXNet's save_checkpoint"
        ) from error


def parse(content: bytes) -> Graph:
    """Raises ValueError."""
    try:
        document = json.loads(content)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not (
        isinstance(document, dict)
        and isinstance(document.get("nodes"), list)
        and isinstance(document.get("heads"), list)
    ):
        raise ValueError("it has no nodes and heads")
    if not 0 < len(document["nodes"]) <= MAX_NODES:
        raise ValueError(f"it has {len(document['nodes'])} nodes, expected 1 to {MAX_NODES}")
    nodes = tuple(_node(place, entry) for place, entry in enumerate(document["nodes"]))
    heads = tuple(_place(entry, len(nodes), "a head") for entry in document["heads"])
    if not 0 < len(heads) <= len(nodes):
        raise ValueError(f"it has {len(heads)} heads")
    return Graph(nodes, heads, any("param" in entry for entry in document["nodes"]))


def _node(place: int, entry: Any) -> Node:
    if not isinstance(entry, dict):
        raise ValueError(f"node {place} is not an object")
    op, name = entry.get("op"), entry.get("name")
    if not (isinstance(op, str) and isinstance(name, str) and 0 < len(op) <= MAX_NAME and 0 < len(name) <= MAX_NAME):
        raise ValueError(f"node {place} has no op and name of at most {MAX_NAME} characters")
    inputs = entry.get("inputs", [])
    if not isinstance(inputs, list):
        raise ValueError(f"node {place} {name!r}: its inputs are not a list")
    options: dict[str, str] = {}
    for key in ("attr", "attrs", "param"):  # the last one wins
        more = entry.get(key) or {}
        if not (isinstance(more, dict) and all(isinstance(value, str) for value in more.values())):
            raise ValueError(f"node {place} {name!r}: its {key} are not texts")
        options.update(more)
    return Node(
        op, name, options, tuple(_place(source, place, f"node {place} {name!r}: an input") for source in inputs)
    )


def _place(entry: Any, below: int, what: str) -> int:
    """The node of [node, number of its output, ...]."""
    if not (isinstance(entry, list) and len(entry) in (2, 3) and all(type(number) is int for number in entry)):
        raise ValueError(f"{what} is not [node, output]")
    if not 0 <= entry[0] < below:
        raise ValueError(f"{what} is node {entry[0]}, expected 0 to {below - 1}")
    if entry[1] != 0:
        raise ValueError(f"{what} is output {entry[1]} of node {entry[0]}; only first outputs are supported")
    place: int = entry[0]
    return place
