"""Writes a network and its weights as an MXNet 1.9 job leaves them: PREFIX-symbol.json and PREFIX-0001.params.

The graph ends with a SoftmaxOutput named "softmax", as in MXNet's image-classification programs. A network with
auxiliary classifiers has further outputs, whose losses are scaled by their weights.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dmltrain import layers
from dmltrain.layers import Network
from dmltrain.mxnet_files import params, weights
from dmltrain.mxnet_files.emit import emit

VERSION = 10901  # of the format: MXNet 1.9.1
LABEL = "softmax_label"


def files(prefix: str, epoch: int, network: Network, arrays: Mapping[str, Any]) -> dict[Path, bytes]:
    """Both files after `epoch` epochs, by path. `arrays`: the network's, by its names (tensors on the CPU, too)."""
    return {
        Path(f"{prefix}-symbol.json"): graph(network),
        Path(f"{prefix}-{epoch:04d}{weights.SUFFIX}"): parameters(network, arrays),
    }


def parameters(network: Network, arrays: Mapping[str, Any]) -> bytes:
    """The content of a .params file. It has ones for fixed gammas, which MXNet expects, and does not read."""
    ones = {fixed_gamma.name: np.ones(fixed_gamma.shape, np.float32) for fixed_gamma in weights.fixed_gammas(network)}
    learned = {f"arg:{parameter.name}": arrays[parameter.name] for parameter in network.parameters()}
    fixed = {f"arg:{name}": values for name, values in ones.items()}
    states = {f"aux:{array.name}": arrays[array.name] for array in network.auxiliary()}
    named = {**learned, **fixed, **states}
    return params.write({name: np.asarray(array, np.float32) for name, array in named.items()})


def graph(network: Network) -> bytes:
    """The content of a symbol.json file."""
    written = _Written(used={array.name for array in (*network.parameters(), *network.auxiliary())})
    logits = emit(network.root, written.variable("data"), written)
    label = written.variable(LABEL)
    heads = [written.operator("SoftmaxOutput", "softmax", [logits, label])]
    for number, (logits, weight) in enumerate(written.auxiliary, 1):
        heads.append(written.operator("SoftmaxOutput", f"softmax{number}", [logits, label], grad_scale=weight))
    document = {
        "nodes": written.nodes,
        "arg_nodes": [place for place, node in enumerate(written.nodes) if node["op"] == "null"],
        "node_row_ptr": list(range(len(written.nodes) + 1)),  # every node has one output
        "heads": [[head, 0, 0] for head in heads],
        "attrs": {"mxnet_version": ["int", VERSION]},
    }
    return json.dumps(document, indent=2).encode()


@dataclass
class _Written:
    """The nodes so far. A place is a node's number; `auxiliary` has the places of further logits, with weights."""

    used: set[str]  # names
    nodes: list[dict[str, Any]] = field(default_factory=list)
    counted: Counter[str] = field(default_factory=Counter)
    auxiliary: list[tuple[int, float]] = field(default_factory=list)

    def variable(self, name: str, **options: object) -> int:
        return self._append({"op": "null", "name": name}, options, [])

    def operator(self, op: str, name: str, inputs: list[int], **options: object) -> int:
        kinds = layers.AUXILIARY_KINDS if op == "BatchNorm" else ()
        changed = [self.variable(f"{name}_{kind}") for kind in kinds]  # inputs that the operator changes
        return self._append(
            {"op": op, "name": self._unique(name or op.strip("_").lower(), numbered=not name)},
            options,
            [[place, 0, int(place in changed)] for place in (*inputs, *changed)],
        )

    def add_output(self, node: int, weight: float) -> None:
        self.auxiliary.append((node, weight))

    def _append(self, node: dict[str, Any], options: dict[str, object], inputs: list[list[int]]) -> int:
        attributes = {"attrs": {name: str(value) for name, value in options.items()}} if options else {}
        self.nodes.append({**node, **attributes, "inputs": inputs})
        return len(self.nodes) - 1

    def _unique(self, name: str, numbered: bool) -> str:
        """The name, or with a number that makes it one of its own."""
        unique = name
        while numbered or unique in self.used:
            unique = f"{name}{self.counted[name]}"
            self.counted[name] += 1
            numbered = False
        self.used.add(unique)
        return unique
