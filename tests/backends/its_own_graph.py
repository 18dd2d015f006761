"""Runs one of MXNet's own graphs: in this process, or in one without oneDNN, whose gradient of LRN is wrong.

That process runs this file as a program, which reads the arguments of `in_its_graph` and writes the result, pickled.
"""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

from tests.backends.both import Outcome, in_symbol, mx
from tests.models.changed import LAST_POOLINGS
from tests.models.mxnet_graphs import names_of_a_new_process

ROOT = Path(__file__).parents[2]


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
