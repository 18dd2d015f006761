"""Runs one of MXNet's own graphs: in this process, or in one without oneDNN, whose gradient of LRN is wrong.

That process runs this file as a program, which reads the arguments of `in_its_graph` and writes the result, pickled.
It needs no torch.
"""

import json
import os
import pickle
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from dmltrain.backends.mxnet import compat as mxnet_compat

mxnet_compat.fit_numpy()
mx = pytest.importorskip("mxnet", reason="mxnet is not installed: the torch backend is not compared with it")
from dmltrain.backends.mxnet import layers as mxnet_layers  # noqa: E402
from tests.models.changed import LAST_POOLINGS  # noqa: E402
from tests.models.mxnet_graphs import names_of_a_new_process  # noqa: E402

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Outcome:
    """What a backend makes of a batch; all numpy, by the network's names."""

    evaluated: np.ndarray  # logits (N, classes) by the moving statistics
    trained: np.ndarray  # logits by the batch's; those of auxiliary outputs follow, (N, outputs x classes)
    gradients: dict[str, np.ndarray]
    statistics: dict[str, np.ndarray]  # moving means and variances after the step


def in_symbol(symbol, network, arrays, images, weights, named=str):
    """The same through any of MXNet's graphs of the network's logits; an executor, because gluon blocks in float64 are
    not a user's case. `named(name)` is the network's name of one of the graph's arrays."""
    dtype = images.dtype
    executor = symbol.simple_bind(mx.cpu(), data=images.shape, grad_req="write", type_dict={"data": dtype})
    ones = {each.name: np.ones(each.shape) for each in mxnet_layers.fixed_gammas(network)}
    for name, each in {**executor.arg_dict, **executor.aux_dict}.items():
        each[:] = mx.nd.array({"data": images, **ones, **arrays}[named(name)], dtype=dtype)
    evaluated = executor.forward(is_train=False)[0].asnumpy()
    outputs = executor.forward(is_train=True)
    trained = np.concatenate([each.asnumpy() for each in outputs], 1)
    executor.backward([mx.nd.array(each, dtype=dtype) for each in np.split(weights, len(outputs), 1)])
    gradients = {named(name): each.asnumpy() for name, each in executor.grad_dict.items()}
    gradients = {each.name: gradients[each.name] for each in network.parameters()}
    return Outcome(evaluated, trained, gradients, {name: each.asnumpy() for name, each in executor.aux_dict.items()})


def in_its_graph(path, last, network, arrays, images, weights) -> Outcome:
    """What MXNet makes of the batch with its graph in the file `path`. `last`: of its last pooling (Graph.last)."""
    symbol = its_logits(path, last)
    renamed = names_of_a_new_process(symbol.list_arguments())
    return in_symbol(symbol, network, arrays, images, weights, named=lambda name: renamed.get(name, name))


def its_logits(path, last):
    """The graph up to the logits, without dropout."""
    graph = json.loads(path.read_text())
    for node in graph["nodes"]:
        if node["op"] == "Dropout":
            node["attrs"]["p"] = "0"
        if last and node["name"] in LAST_POOLINGS:
            node["attrs"]["kernel"] = f"({last}, {last})"
    return mx.sym.load_json(json.dumps(graph)).get_children()[0]


def without_onednn(*arguments) -> Outcome:
    """The same in a process of its own."""
    environment = {**os.environ, "MXNET_MKLDNN_ENABLED": "0", "MXNET_STORAGE_FALLBACK_LOG_VERBOSE": "0"}
    command = [sys.executable, "-m", "tests.backends.its_own_graph"]
    done = subprocess.run(
        command, input=pickle.dumps(arguments), env=environment, cwd=ROOT, check=True, stdout=subprocess.PIPE
    )
    return Outcome(**pickle.loads(done.stdout))


if __name__ == "__main__":
    sys.stdout.buffer.write(pickle.dumps(vars(in_its_graph(*pickle.load(sys.stdin.buffer)))))
