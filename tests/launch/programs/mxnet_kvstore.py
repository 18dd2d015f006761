"""What MXNet's own tests of its distributed store do, as a program that knows nothing of dmltrain: `python X.py`."""

import os

import mxnet as mx
import mxnet_compression
import numpy as np

SMALL, BIG = (2, 3), (60, 70)  # MXNET_KVSTORE_BIGARRAY_BOUND=1000: the big one is sliced over the servers
RATE, ROUNDS = mxnet_compression.RATE, 3

store = mx.kv.create("dist_sync")
rank, workers = store.rank, store.num_workers
everybody = workers * (workers + 1) // 2  # the sum of rank + 1 over the workers


def equal(found: mx.nd.NDArray, expected: float | np.ndarray, what: str) -> None:
    assert (found.asnumpy() == expected).all(), f"{what}: {found.asnumpy()}, expected {expected}"


def dense(key: str, shape: tuple[int, int], dtype: str) -> None:
    store.init(key, mx.nd.ones(shape, dtype=dtype))
    for done in range(1, ROUNDS + 1):
        store.push(key, mx.nd.ones(shape, dtype=dtype) * (rank + 1))
        value = mx.nd.zeros(shape, dtype=dtype)
        store.pull(key, out=value)
        equal(value, 1 + done * RATE * everybody, f"{dtype} key {key} after {done} rounds")


def row_sparse(key: str, shape: tuple[int, int]) -> None:
    store.init(key, mx.nd.ones(shape).tostype("row_sparse"))
    gradient = mx.nd.zeros(shape)
    gradient[rank % shape[0]] = rank + 1
    expected = np.ones(shape)
    for other in range(workers):
        expected[other % shape[0]] += RATE * (other + 1)
    store.push(key, gradient.tostype("row_sparse"))
    value = mx.nd.sparse.zeros("row_sparse", shape)
    store.row_sparse_pull(key, out=value, row_ids=mx.nd.arange(shape[0]))
    equal(value, expected, f"row_sparse key {key}")


store.set_optimizer(mx.optimizer.create("test", rescale_grad=RATE))  # adds RATE * gradient, on the servers
for dtype in ("float32", "float16"):
    dense(f"small {dtype}", SMALL, dtype)
    dense(f"big {dtype}", BIG, dtype)
row_sparse("rows", SMALL)
row_sparse("many rows", BIG)
mxnet_compression.check(store, waits=True)
print(f"rank {rank} of {workers}, worker {os.environ['DMLC_WORKER_ID']}: all equal")
