"""A program with Module.fit and `--kv-store`, as MXNet's examples are. Knows nothing of dmltrain."""

import argparse
import logging

import mxnet as mx
import numpy as np

parser = argparse.ArgumentParser()
parser.add_argument("--kv-store", default="local")
parser.add_argument("--num-epochs", type=int, default=3)
parser.add_argument("--fail", type=int, default=-1, help="the worker that fails, by its rank, in its first epoch")
options = parser.parse_args()

store = mx.kv.create(options.kv_store)
logging.basicConfig(level=logging.INFO, format=f"%(asctime)-15s Node[{store.rank}] %(message)s")
numbers = np.random.RandomState(store.rank)
samples = numbers.normal(size=(256, 8)).astype(np.float32)
labels = (samples[:, :4].sum(axis=1) > samples[:, 4:].sum(axis=1)).astype(np.float)  # the old name of float


def network() -> mx.sym.Symbol:
    hidden = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=16, name="fc1")
    logits = mx.sym.FullyConnected(mx.sym.Activation(hidden, act_type="relu"), num_hidden=2, name="fc2")
    return mx.sym.SoftmaxOutput(logits, name="softmax")


def fail(batch: object) -> None:
    if options.fail == store.rank:
        raise RuntimeError("this worker is to fail")


mx.mod.Module(network(), context=mx.cpu()).fit(
    mx.io.NDArrayIter(samples, labels, 32, shuffle=True),
    eval_data=mx.io.NDArrayIter(samples, labels, 32),
    eval_metric=["accuracy", "ce"],
    kvstore=store,
    optimizer="sgd",
    optimizer_params={"learning_rate": 0.05, "momentum": 0.9, "wd": 1e-4},
    initializer=mx.init.Xavier(rnd_type="gaussian", factor_type="in", magnitude=2),
    num_epoch=options.num_epochs,
    batch_end_callback=[mx.callback.Speedometer(32, 4), fail],
)
