"""A plain gluon program: two lines make it distributed, as MXNet's tutorial has them. Knows nothing of dmltrain."""

import hashlib

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

store = mx.kv.create("dist_sync")
mx.random.seed(store.rank)  # different first weights: the store's are rank 0's
numbers = np.random.RandomState(0)
samples = numbers.normal(size=(64, 8)).astype(np.float32)
labels = (samples[:, :4].sum(axis=1) > samples[:, 4:].sum(axis=1)).astype(np.float32)
part = slice(store.rank, None, store.num_workers)
loader = gluon.data.DataLoader(gluon.data.ArrayDataset(samples[part], labels[part]), 8)

network = gluon.nn.HybridSequential()
network.add(gluon.nn.Dense(16, activation="relu", in_units=8), gluon.nn.Dense(2, in_units=16))
network.initialize(mx.init.Xavier())
network.hybridize()
trainer = gluon.Trainer(network.collect_params(), "sgd", {"learning_rate": 0.5, "momentum": 0.9}, kvstore=store)
loss = gluon.loss.SoftmaxCrossEntropyLoss()
for _ in range(10):
    for data, label in loader:
        with autograd.record():
            losses = loss(network(data), label)
        losses.backward()
        trainer.step(8 * store.num_workers)

accuracy = mx.metric.Accuracy()
accuracy.update([mx.nd.array(labels)], [network(mx.nd.array(samples))])
weights = b"".join(parameter.data().asnumpy().tobytes() for parameter in network.collect_params().values())
print(f"accuracy={accuracy.get()[1]:.3f} weights={hashlib.sha256(weights).hexdigest()}")
