"""Small networks, their batches, and PyTorch trainers of them in the test's own process."""

import numpy as np

from dmltrain import kvstore, models
from dmltrain.layers import BatchNorm, Conv, Dense, Flatten, Network, chain
from dmltrain.options import parse

MLP = models.create("mlp", None, 10, (1, 8, 8))
RESNET = models.create("resnet", 8, 10, (3, 16, 16))  # with batch norm
SMALL = Network("tiny", chain(Conv("conv0", 4, kernel=3), BatchNorm("bn0"), Flatten(), Dense("fc0", 10)), (3, 8, 8), 10)


def torch_trainer(network=MLP, line="", store=None, state=None):
    from dmltrain.backends.torch.trainer import TorchTrainer

    words = ["--kv-store", store.type if store else "local", *line.split()]
    return TorchTrainer(network, parse(words), store or kvstore.create("local"), state)


def batch(network=MLP, count=16, seed=0):
    draw = np.random.default_rng(seed)
    images = draw.standard_normal((count, *network.input_shape), dtype=np.float32)
    return images, draw.integers(0, network.num_classes, count)
