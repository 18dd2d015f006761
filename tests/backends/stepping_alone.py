"""Small models and their local steps, for tests of dist_local. They need torch."""

import threading

import torch
from torch import nn

from tests.connected import connected

MEAN = (1.0, 0.0)  # outer learning rate and momentum
NESTEROV = (0.7, 0.9)
SEEDING = threading.Lock()  # torch has one generator for the workers' threads


class Line(nn.Module):
    """Its loss has the same gradient at all weights: `slopes`."""

    def __init__(self, size=4):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(float(size)))

    def forward(self, slopes):
        return (self.weight * slopes).sum()


def slopes(store, size=4):
    """Each worker's; all their products and means are exact."""
    return torch.arange(1.0, size + 1) * (1 + 2 * store.rank)


def step(optimizer, model, slopes):
    optimizer.zero_grad()
    model(slopes).backward()
    optimizer.step()


def weights(model):
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]).tolist()


def perceptron(seed):
    with SEEDING:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def batches(rank, count, size=5):
    draw = torch.Generator().manual_seed(100 + rank)
    return [torch.randn(size, 6, generator=draw) for _ in range(count)]


def joined(store, model, averaging, lr=1.0):
    return connected(model, torch.optim.SGD(model.parameters(), lr=lr), store, averaging=averaging)


def train(model, optimizer, batches):
    for x in batches:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def trained(store, kind, averaging, count, **options):
    """The weights after so many steps on this worker's batches."""
    model = perceptron(store.rank)
    made = connected(model, kind(model.parameters(), lr=0.1, **options), store, averaging=averaging)
    train(model, made, batches(store.rank, count))
    return model, made
