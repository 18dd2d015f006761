"""A network for tests of sufficient factors."""

import torch
from torch import nn


class Net(nn.Module):
    """Two dense layers whose factors can be kept, of which one is used for several positions, and others."""

    def __init__(self, seed=0):
        super().__init__()
        self.first, self.last = nn.Linear(7, 40), nn.Linear(40, 3, bias=False)
        self.norm, self.convolution = nn.LayerNorm(40), nn.Conv1d(2, 2, 3, padding=1)
        self.tied = nn.Linear(3, 3)
        self.also_tied = nn.Linear(3, 3)
        self.also_tied.weight = self.tied.weight
        draw = torch.Generator().manual_seed(seed)  # the workers are threads, which share torch's own
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=draw) / 3)

    def forward(self, x):
        return self.also_tied(self.tied(self.last(self.norm(torch.tanh(self.first(self.convolution(x)))))))
