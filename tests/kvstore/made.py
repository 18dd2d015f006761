"""Control messages from plain values, as they come from the wire."""

import json

import numpy as np

from dmltrain.kvstore.transport.message import Declare, Key, ServerAddress, Start, WorkerAddress, decode
from dmltrain.kvstore.transport.wire import Kind


def declared(content):
    """A Declare; keys are sums of all workers' pushes, unless they say otherwise. Raises FrameError."""
    content = {**content, "keys": [{"mean": False, "pusher": -1, **key} for key in content["keys"]]}
    message = decode(Kind.DECLARE, json.dumps(content).encode())
    assert isinstance(message, Declare)
    return message


def start(workers, servers):
    """A Start of workers (host_id, socket_name) and servers (host, port, socket_name, host_id)."""
    return Start(
        tuple(ServerAddress(*each) for each in servers),
        tuple(WorkerAddress(socket_name, host_id) for host_id, socket_name in workers),
    )


def declaration(kind="dist_sync", staleness=0.0, sizes=(5, 3), weight=True, dtype="float32", compression=None):
    return Declare(
        kind,
        staleness,
        tuple(
            Key(k, f"k{k}", dtype, weight, compression or {"type": "none"}, ((0, size),))
            for k, size in enumerate(sizes)
        ),
    )


def plain_sgd(spec, key, value):
    def step(value, gradient, rate):
        value -= np.float32(rate) * gradient

    return step
