"""What MXNet's nightly tests of 2-bit compression do with random gradients: `python X.py [--wait]`. Knows nothing of
dmltrain. Without `--wait` it compares with a pull that may get the value after the push (docs/mxnet.md)."""

import os
import sys

import mxnet as mx
import numpy as np

SHAPES = {"small": (2, 3), "other": (7, 5), "big": (60, 70)}  # MXNET_KVSTORE_BIGARRAY_BOUND=1000 divides the big one
RATE, ROUNDS, THRESHOLD = 2, 7, 0.5


def compare(store: mx.kv.KVStore, key: str, numbers: np.random.RandomState, waits: bool) -> None:
    """Each push changes the weights by what its two bits stand for; the rest waits in the residual."""

    def pulled() -> mx.nd.NDArray:
        value = mx.nd.zeros(SHAPES[key])
        store.pull(key, out=value)
        if waits:
            value.wait_to_read()
        return value

    residual = np.zeros(SHAPES[key], np.float32)
    for number in range(ROUNDS):
        before = pulled()
        gradient = numbers.uniform(-1, 1, SHAPES[key]).astype(np.float32)
        store.push(key, mx.nd.array(gradient))
        found = (pulled() - before).asnumpy()
        residual += gradient
        sent = THRESHOLD * ((residual >= THRESHOLD).astype(np.float32) - (residual <= -THRESHOLD))
        residual -= sent
        expected = RATE * store.num_workers * sent
        assert (found == expected).all(), f"{key}, push {number}: changed by {found}, expected {expected}"


def check(store: mx.kv.KVStore, waits: bool) -> None:
    """The store has an optimizer that adds RATE * gradient on the servers."""
    store.set_gradient_compression({"type": "2bit", "threshold": THRESHOLD})
    for key, shape in SHAPES.items():
        store.init(key, mx.nd.zeros(shape))
    numbers = np.random.RandomState(123)  # the same on all workers
    for key in SHAPES:
        compare(store, key, numbers, waits)


if __name__ == "__main__":
    store = mx.kv.create("dist_sync")
    store.set_optimizer(mx.optimizer.create("test", rescale_grad=RATE))
    check(store, "--wait" in sys.argv)
    print(f"worker {os.environ['DMLC_WORKER_ID']}: all equal")
