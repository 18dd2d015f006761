"""Rebuilds a network from MXNet's graph, as a tree of dmltrain's layers.

The immediate dominator of a node is the last node that lies on every path from the images to it. A graph is a tree of
chains and joins if all branches of each join (Concat, sum) start at the join's immediate dominator, and share no other
node. For each node in order, `_Rebuilding` finds the immediate dominator, and the layer that leads from there to the
node; for a join this layer contains the branches. For an operator with one input the dominator is the input.

Inputs of a join may share more than the dominator, as the ends of a forked branch of Inception do. Such a join is
split: neighbours that share nodes are joined first. The result of a concatenation or a sum stays the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from dmltrain.base.errors import UserError
from dmltrain.layers import Chain, Layer, Network, Rule, Shape, ShapeError, chain
from dmltrain.mxnet_files.graph import Graph, Node
from dmltrain.mxnet_files.graph import read as read_graph
from dmltrain.mxnet_files.node_options import NodeOptions, NotSupported
from dmltrain.mxnet_files.operators import LOSSES, OPERATORS, One, Place, Several

MAX_DEPTH = 50  # joins inside of joins
MAX_STEPS = 5_000_000  # from node to dominator: a network of thousands of nodes takes some ten thousand
OTHER_NAMES = {"moving_mean": "running_mean", "moving_var": "running_var"}  # gluon's


@dataclass(frozen=True)
class Rebuilt:
    """A network, and the names of its arrays in the graph's files, by the network's own names."""

    network: Network
    names: dict[str, str]


def read(source: Path, num_classes: int | None, image_shape: tuple[int, int, int]) -> Rebuilt:
    """The network of a file; `num_classes` None: as many as it has. Raises UserError, which names the first node that
    dmltrain's layers cannot say."""
    graph = read_graph(source)
    name = source.name.removesuffix(".json").removesuffix("-symbol")
    try:
        return rebuild(graph, name, num_classes, image_shape)
    except ShapeError as error:
        shape = "x".join(map(str, image_shape))
        raise UserError(
            f"the network in {source} does not fit this data set, with images of {shape} (channels x height x width) "
            f"and {num_classes or 'any number of'} classes: {error}"
        ) from error
    except NotSupported as error:
        raise UserError(
            f"cannot rebuild the network in {source} from dmltrain's layers: {error}. An MXNet program that uses this "
            "graph runs under dmltrain-launch as it is"
        ) from error


def rebuild(graph: Graph, name: str, num_classes: int | None, image_shape: tuple[int, int, int]) -> Rebuilt:
    """Raises NotSupported and ShapeError."""
    if len(graph.heads) > 1:
        raise NotSupported(f"it has {len(graph.heads)} outputs: {_labels(graph, graph.heads)}; expected one")
    work = _Rebuilding(graph, image_shape)
    logits = _logits(graph)
    for place in _needed(graph, logits):
        work.add(place)
    root = work.in_sequence(work.take_path(work.images, logits))
    classes = work.shapes[logits][0] if num_classes is None else num_classes
    return Rebuilt(Network(name, root, image_shape, classes), work.names)


def _labels(graph: Graph, places: tuple[int, ...]) -> str:
    return ", ".join(graph.nodes[place].label for place in places[:5])


def _logits(graph: Graph) -> int:
    """The head, or the first input of the loss there."""
    (head,) = graph.heads
    node = graph.nodes[head]
    logits = next(iter(node.inputs), head) if node.op in LOSSES else head
    if logits == head and node.op in LOSSES or graph.nodes[logits].is_variable:
        raise NotSupported(f"its output, {node.label}, is computed from no layer")
    return logits


def _needed(graph: Graph, last: int) -> Iterator[int]:
    """The operators that `last` is computed from, in order."""
    needed = {last}
    for place in range(last, -1, -1):
        if place in needed:
            needed.update(graph.nodes[place].inputs)
    return (place for place in sorted(needed) if not graph.nodes[place].is_variable)


@dataclass
class _Rebuilding:
    """What is known of the nodes so far; the keys are places, the nodes' indices in the graph."""

    graph: Graph
    image_shape: tuple[int, int, int]
    images: int = -1  # the variable of the images
    names: dict[str, str] = field(default_factory=dict)
    before: dict[int, int] = field(default_factory=dict)  # the immediate dominator of a node ...
    layers: dict[int, Layer] = field(default_factory=dict)  # ... and what leads from it to the node
    shapes: dict[int, Shape] = field(default_factory=dict)
    level: dict[int, int] = field(default_factory=dict)  # how many dominators it has
    depth: dict[int, int] = field(default_factory=dict)  # of joins in it
    taken: set[int] = field(default_factory=set)  # nodes and arrays that are in the network already
    steps: int = 0

    def add(self, place: int) -> None:
        """Find the layer of a node whose inputs are known."""
        node = self.graph.nodes[place]
        try:
            row = OPERATORS.get(node.op)
            if row is None:
                raise NotSupported(f"this operator is not supported; supported: {', '.join(OPERATORS)}")
            inputs = self._inputs(node, 1 if isinstance(row, One) else len(node.inputs))
            self.before[place] = before = self._common_dominator(inputs)
            self.level[place], self.depth[place] = self.level[before] + 1, 0
            options = NodeOptions(node)
            if isinstance(row, One):
                shape = self.shapes[inputs[0]]
                name, rules = self._arrays(node, row.kinds(node))
                layer = row.layer(options, Place(name, shape, self.graph.oldest, rules))
            else:
                layer = self._join(row, options, place, inputs)
            options.finish()
            self.shapes[place] = layer.output_shape(self.shapes[self.before[place]])
        except (NotSupported, ShapeError) as error:
            raise type(error)(f"{node.label}: {error}") from error
        self.layers[place] = layer

    def _inputs(self, node: Node, count: int) -> tuple[int, ...]:
        """The first `count` inputs. The first variable among the inputs of all nodes are the images."""
        if not node.inputs:
            raise NotSupported("it has no input")
        for place in node.inputs[:count]:
            if self.images < 0 and self.graph.nodes[place].is_variable:
                self.images, self.shapes[place], self.level[place] = place, self.image_shape, 0
            if place not in self.shapes:
                raise NotSupported(f"its input {self.graph.nodes[place].name!r} is a second input of the network")
        return node.inputs[:count]

    # -- arrays -------------------------------------------------------------------------------------------------------

    def _arrays(self, node: Node, kinds: tuple[str, ...]) -> tuple[str, dict[str, Rule]]:
        """The layer's name, and the multipliers of its arrays. The name is chosen so that the layer's arrays have the
        names of the file; if no name does that, it is the node's. Files from before MXNet 0.9 do not list auxiliary
        states."""
        variables = node.inputs[1:]
        if len(variables) != len(kinds) and not (self.graph.oldest and len(variables) == len(kinds) - 2):
            raise NotSupported(f"it has {len(variables)} arrays, expected {len(kinds)}: {', '.join(kinds)}")
        rules = {
            kind: rule
            for kind, place in zip(kinds, variables, strict=False)
            if (rule := _rule(self.graph.nodes[place])) != Rule()
        }
        arrays = [self._array(place) for place in variables]
        arrays += [f"{node.name}_{kind}" for kind in kinds[len(arrays) :]]
        starts = {_start(array, kind) for array, kind in zip(arrays, kinds, strict=True)}
        name = starts.pop() if len(starts) == 1 else ""
        name = name or node.name
        self.names.update((f"{name}_{kind}", array) for array, kind in zip(arrays, kinds, strict=True))
        return name, rules

    def _array(self, place: int) -> str:
        node = self.graph.nodes[place]
        if not node.is_variable:
            raise NotSupported(f"its input {node.name!r} is computed, expected a learned array")
        if place in self.taken:
            raise NotSupported(f"it shares its array {node.name!r} with another node")
        self.taken.add(place)
        return node.name

    # -- joins --------------------------------------------------------------------------------------------------------

    def _common_dominator(self, places: tuple[int, ...]) -> int:
        """The last node that lies on every path from the images to each of these nodes."""
        first, *others = places
        for other in others:
            while first != other:
                if self.level[first] >= self.level[other]:
                    first = self._dominator(first)
                else:
                    other = self._dominator(other)
        return first

    def _dominator(self, place: int) -> int:
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise NotSupported("the graph has too many branches around this node")
        return self.before[place]

    def take_path(self, start: int, end: int) -> list[int]:
        """The nodes after `start` up to `end`, which `start` dominates. Each node can be taken only once."""
        places = []
        while end != start:
            if end in self.taken:
                shared = self.graph.nodes[end].label
                raise NotSupported(f"it shares {shared} with another branch, which a tree cannot have")
            self.taken.add(end)
            places.append(end)
            end = self._dominator(end)
        return places[::-1]

    def in_sequence(self, places: list[int], *more: Layer) -> Layer:
        """The layers of these nodes, and `more`, in one chain."""
        sequence = [*(self.layers[place] for place in places), *more]
        return chain(*(part for layer in sequence for part in (layer.layers if isinstance(layer, Chain) else (layer,))))

    def _join(self, row: Several, options: NodeOptions, place: int, ends: tuple[int, ...]) -> Layer:
        node, start = self.graph.nodes[place], self.before[place]
        if row.first_is_whole:
            if ends[0] != start:
                raise NotSupported("its first input must be what the others are computed from")
            ends = ends[1:]
        return row.join(options, node.name, self._branches(row, options, place, start, ends, 1))

    def _branches(
        self, row: Several, options: NodeOptions, place: int, start: int, ends: tuple[int, ...], depth: int
    ) -> tuple[Layer, ...]:
        """The branches from `start` to each of `ends`; neighbours that share nodes after `start` are one branch."""
        branches = []
        for group in self._neighbours(start, ends):
            shared = self._common_dominator(group)
            path = self.take_path(start, shared)
            self.depth[place] = max(self.depth[place], depth, *(depth + self.depth[number] for number in path))
            if self.depth[place] > MAX_DEPTH:
                raise NotSupported(f"it is the end of more than {MAX_DEPTH} branches inside of branches")
            inner = self._branches(row, options, place, shared, group, depth + 1) if len(group) > 1 else ()
            branches.append(self.in_sequence(path, *([row.join(options, "", inner)] if inner else [])))
        return tuple(branches)

    def _neighbours(self, start: int, ends: tuple[int, ...]) -> list[tuple[int, ...]]:
        """`ends` in groups of neighbours that one node after `start` dominates."""
        groups: list[tuple[int, ...]] = []
        for first, ends_of_branch in groupby(ends, lambda end: self._first_after(start, end)):
            group = tuple(ends_of_branch)
            groups += [(end,) for end in group] if first == start else [group]
        return groups

    def _first_after(self, start: int, end: int) -> int:
        """The first node after `start` on the path to `end`; `start` itself if both are the same."""
        below = end
        while end != start:
            below, end = end, self._dominator(end)
        return below


def _start(array: str, kind: str) -> str:
    """'conv0' of 'conv0_weight'; '' for a name that does not end with its kind."""
    for ending in (kind, OTHER_NAMES.get(kind, kind)):
        if array.endswith(f"_{ending}"):
            return array.removesuffix(f"_{ending}")
    return ""


def _rule(variable: Node) -> Rule:
    """How the array learns: its attributes __lr_mult__ and __wd_mult__."""
    given = {name: variable.options.get(f"__{name}__", variable.options.get(name)) for name in ("lr_mult", "wd_mult")}
    try:
        numbers = {name: None if text is None else float(text) for name, text in given.items()}
        return Rule(lr_mult=1.0 if numbers["lr_mult"] is None else numbers["lr_mult"], wd_mult=numbers["wd_mult"])
    except ValueError as error:
        raise NotSupported(f"its input {variable.name!r}: {error}") from None
