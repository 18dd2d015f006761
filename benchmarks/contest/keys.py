"""A script that trains ResNet-50's parameters as 100 arrays, 102 MB, and computes next to nothing.

    keys.py FOLDER EPOCHS STEPS

So a step is its gradients' way to the servers and back, and an SGD step with momentum on the worker. The script runs in
elastic jobs without a change. After each step a worker writes the time, in seconds, as a line of FOLDER/steps-RANK.
"""

import sys
import time
from pathlib import Path

import torch
from workload import MOMENTUM, resnet50_shapes

import dmltrain


class Fixed(torch.autograd.Function):
    """A loss whose gradients are given: backward writes them and computes nothing."""

    @staticmethod
    def forward(context, gradients, *parameters):
        context.gradients = gradients
        return sum(parameter.detach().reshape(-1)[0] for parameter in parameters)

    @staticmethod
    def backward(context, _):
        return (None, *context.gradients)


class Keys(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.arrays = torch.nn.ParameterList(torch.zeros(shape) for shape in resnet50_shapes())
        self.gradients = [torch.full(shape, 0.5) for shape in resnet50_shapes()]

    def forward(self, _):
        return Fixed.apply(self.gradients, *self.arrays)


def main(folder: Path, epochs: int, steps: int) -> None:
    model = Keys()
    inner = torch.optim.SGD(model.parameters(), lr=2.0**-10, momentum=MOMENTUM)
    optimizer = dmltrain.distribute(model, inner, step_early=True)
    state = dmltrain.State(model=model, optimizer=optimizer)
    data = torch.utils.data.TensorDataset(torch.zeros(steps * dmltrain.num_workers()))
    loader = dmltrain.loader(data, batch_size=1, seed=1)
    with (folder / f"steps-{dmltrain.rank()}").open("w", buffering=1) as ends:
        for _ in state.epochs(epochs):
            for samples in loader:
                optimizer.zero_grad()
                model(samples).backward()
                optimizer.step()
                print(time.perf_counter(), file=ends)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
