"""A model whose loss pulls its weights towards a worker's own values: gradients are exact differences, the same bits in
every process."""

import torch

LENGTH = 20_000  # elements
STEPS = 3


class Pulling(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(LENGTH))

    def forward(self, values):
        return (self.weight - values).square().sum() / 2


def train(rank, distribute):
    """Some steps of `distribute(model, optimizer)`: the weights after them, and the bytes that they sent."""
    model = Pulling()
    optimizer = distribute(model, torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9))
    values = torch.randn(LENGTH, generator=torch.Generator().manual_seed(rank))
    before = optimizer.store.bytes_sent
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(values).backward()
        optimizer.step()
    return model.weight.detach().numpy(), optimizer.store.bytes_sent - before
