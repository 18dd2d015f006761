"""Rounds of pushes and pulls in every way that memory can lie; prints a digest of all results as JSON.

Arguments: transport of the workers, transport of the servers, type of compression, first and last round, file for what
compression holds back ("" for none; read when the first round is not 1, else written after the last).
"""

import hashlib
import json
import os
import sys

import numpy as np

from dmltrain import kvstore

SIZES = {"big": 300_000, "one": 1, "odd": 70_001, "none": 0}  # elements; the first is several slices


def gradient(rank: int, clock: int, name: str) -> np.ndarray:
    numbers = np.random.default_rng([rank, clock, len(name)])
    return (numbers.standard_normal(SIZES[name]) * 1e-3).astype(np.float32)


def main() -> None:
    workers, servers, kind, first, last, path = sys.argv[1:]
    transport = workers if os.environ["DMLC_ROLE"] == "worker" else servers
    store = kvstore.create("dist_sync", transport=transport)
    store.set_gradient_compression({"type": kind})
    keys = list(SIZES)
    store.init(keys, [np.zeros(size, np.float32) for size in SIZES.values()])
    if int(first) > 1 and path:
        with np.load(path) as archive:
            store.load_residuals(dict(archive))
    buffers, outs = store.buffers(keys), [np.zeros(size, np.float32) for size in SIZES.values()]
    digest, error, before = hashlib.sha256(), 0.0, store.bytes_sent
    for clock in range(int(first), int(last) + 1):
        fresh = [gradient(store.rank, clock, name) for name in keys]
        if clock % 3 == 0:  # the program's own memory, in and out
            store.pushpull(keys, fresh, out=outs)
            results = outs
        else:  # the store's memory; read where it is
            for buffer, values in zip(buffers, fresh, strict=True):
                buffer[:] = values
            results = store.pushpull(keys, buffers, out=kvstore.READ).values
            assert not any(result.flags.writeable for result in results)
        every = range(store.num_workers)
        expected = [sum(gradient(rank, clock, name).astype(np.float64) for rank in every) for name in keys]
        for result, values in zip(results, expected, strict=True):
            error = max(error, float(np.abs(result - values).max(initial=0.0)))
        this = hashlib.sha256(b"".join(result.tobytes() for result in results)).hexdigest()
        digest.update(this.encode())
    sent = store.bytes_sent - before
    if path and int(first) == 1:
        residuals = store.residuals()
        if store.rank == 0:
            np.savez(path, **residuals)
    shared = sum(server.traffic.shared_sent for server in store._routes.servers)
    print(json.dumps({"digest": digest.hexdigest(), "last": this, "error": error, "sent": sent, "shared": shared}))
    store.close()


main()
