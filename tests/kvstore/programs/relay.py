"""Rounds of pushes and pulls by workers on several hosts; prints as JSON a digest of all results, how far they are from
the sum of the gradients, and the bytes that this worker has sent through the network's sockets.

Argument: whether servers make the optimizer's steps at the end ("steps").
"""

import hashlib
import json
import socket
import sys

import numpy as np

from dmltrain import kvstore

SIZES = {"big": 300_000, "one": 1, "odd": 70_001, "none": 0, "double": 1000}  # elements; the first is several slices
KEYS = list(SIZES)
ROUNDS = 5


def gradient(rank: int, clock: int, name: str) -> np.ndarray:
    values = np.random.default_rng([rank, clock, len(name)]).random(SIZES[name], np.float32) * 2 - 1
    return (values * 1e-3).astype(np.float64 if name == "double" else np.float32)


def expected(store, clock: int) -> list[np.ndarray]:
    return [sum(gradient(rank, clock, name).astype(np.float64) for rank in range(store.num_workers)) for name in KEYS]


def over_the_network(store) -> int:
    return sum(link.link.bytes_sent for link in store._routes.all_links if link.link.sock.family == socket.AF_INET)


def round_of(store, clock: int, outs: list[np.ndarray]) -> list[np.ndarray]:
    """One round, in one of the ways in which a program can make it."""
    fresh = [gradient(store.rank, clock, name) for name in KEYS]
    if clock % 3 == 0:
        store.push(KEYS, fresh)
        store.pull(KEYS, outs)
        return outs
    if clock % 3 == 1:
        return store.pushpull(KEYS, fresh, out=kvstore.READ).values
    store.pushpull(KEYS, fresh, out=outs)
    return outs


def steps_of_servers(store, outs: list[np.ndarray]) -> None:
    """Weights that servers step from the last round's sums; loaded again, they are what they were."""
    before = expected(store, ROUNDS)
    store.set_optimizer({"name": "sgd", "lr": 0.5, "momentum": 0.9})
    weights = [values.copy() for values in round_of(store, ROUNDS + 1, outs)]
    for mine, start, gradients in zip(weights, before, expected(store, ROUNDS + 1), strict=True):
        assert np.allclose(mine, start - 0.5 * gradients, rtol=0.0, atol=1e-8)
    states = store.optimizer_states()
    store.barrier()
    assert not np.array_equal(round_of(store, ROUNDS + 2, outs)[0], weights[0])
    store.load_optimizer_state_bytes(states)
    store.pull(KEYS, outs)
    assert all(map(np.array_equal, outs, weights)), "a state that was loaded"


def main() -> None:
    store = kvstore.create("dist_sync")
    first = [np.full(SIZES[name], 0.5, gradient(0, 0, name).dtype) for name in KEYS]
    outs = [np.zeros_like(values) for values in first]
    store.init(KEYS, first)
    store.pull(KEYS, outs)
    assert all(map(np.array_equal, outs, first)), "the first weights"
    digest, error, before = hashlib.sha256(), 0.0, over_the_network(store)
    for clock in range(1, ROUNDS + 1):
        results, sums = round_of(store, clock, outs), expected(store, clock)
        for mine, right in zip(results, sums, strict=True):
            error = max(error, float(np.abs(mine - right).max(initial=0.0)))
        digest.update(b"".join(result.tobytes() for result in results))
    sent = over_the_network(store) - before
    if sys.argv[1] == "steps":
        steps_of_servers(store, outs)
    print(json.dumps({"digest": digest.hexdigest(), "error": error, "sent": sent}))
    store.close()


main()
