"""What MXNet's nightly tests of 2-bit compression do with random gradients: `python X.py [--wait]`. Knows nothing of
dmltrain. Without `--wait` it compares with a pull that may get the value after the push (docs/mxnet.md)."""

import os
import sys

import mxnet as mx
import numpy as np

SHAPES = {"small": (2, 3), "other": (7, 5), "big": (60, 70)}  # MXNET_KVSTORE_BIGARRAY_BOUND=1000 divides the big one
RATE, ROUNDS, THRESHOLD = 2, 7, 0.5

store = mx.kv.create("dist_sync")
numbers = np.random.RandomState(123)  # the same on all workers


def pulled(key: str) -> mx.nd.NDArray:
    value = mx.nd.zeros(SHAPES[key])
    store.pull(key, out=value)
    if "--wait" in sys.argv:
        value.wait_to_read()
    return value


def compare(key: str) -> None:
    """Each push changes the weights by what its two bits stand for; the rest waits in the residual."""
    residual = np.zeros(SHAPES[key], np.float32)
    for number in range(ROUNDS):
        before = pulled(key)
        gradient = numbers.uniform(-1, 1, SHAPES[key]).astype(np.float32)
        store.push(key, mx.nd.array(gradient))
        found = (pulled(key) - before).asnumpy()
        residual += gradient
        sent = THRESHOLD * ((residual >= THRESHOLD).astype(np.float32) - (residual <= -THRESHOLD))
        residual -= sent
        expected = RATE * store.num_workers * sent
        assert (found == expected).all(), f"{key}, push {number}: changed by {found}, expected {expected}"


store.set_optimizer(mx.optimizer.create("test", rescale_grad=RATE))  # adds RATE * gradient, on the servers
store.set_gradient_compression({"type": "2bit", "threshold": THRESHOLD})
for key, shape in SHAPES.items():
    store.init(key, mx.nd.zeros(shape))
for key in SHAPES:
    compare(key)
print(f"worker {os.environ['DMLC_WORKER_ID']}: all equal")
