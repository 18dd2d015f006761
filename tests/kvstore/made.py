"""Control messages from plain values, and the step of an optimizer."""

import numpy as np

from dmltrain.kvstore import types
from dmltrain.kvstore.kind import KVStoreKind
from dmltrain.kvstore.transport.message.data import Declare, DeclaredKey
from dmltrain.kvstore.transport.message.job import ServerAddress, Start, WorkerAddress

SYNC = KVStoreKind(types.find("dist_sync"), 0.0)


def start(workers, servers):
    """A Start of workers (host_id, socket_name) and servers (host, port, socket_name, host_id)."""
    addresses = tuple(WorkerAddress(socket_name, host_id) for host_id, socket_name in workers)
    return Start(tuple(ServerAddress(*server) for server in servers), addresses)


def declaration(kind="dist_sync", staleness=0.0, sizes=(5, 3), weight=True, dtype="float32", compression=None):
    coding = compression or {"type": "none"}
    keys = [DeclaredKey(k, f"k{k}", dtype, weight, coding, ((0, size),)) for k, size in enumerate(sizes)]
    return Declare(kind, staleness, tuple(keys))


def plain_sgd(spec, key, value):
    def step(value, gradient, rate):
        value -= np.float32(rate) * gradient

    return step
