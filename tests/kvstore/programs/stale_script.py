"""A script that asks for dist_ssp and 2bit. The other worker makes its only step after the second barrier."""

import json

import torch

import dmltrain
from dmltrain.backends.torch import plain_step

plain_step.postpone_compiler()  # takes a second


class Slope(torch.nn.Module):
    """The gradient of each weight is 0.5."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3))

    def forward(self) -> torch.Tensor:
        return self.weight.sum() / 2


model = Slope()
inner = torch.optim.SGD(model.parameters(), lr=1.0)
optimizer = dmltrain.distribute(
    model, inner, "dist_ssp", staleness=1, compression={"type": "2bit", "threshold": 1.0}, transport="tcp"
)
found = []
for _ in range(2):
    optimizer.settle()
    found.append(model.weight.tolist())
    optimizer.zero_grad()
    model().backward()
    optimizer.step()
optimizer.store.barrier()
waits = [not handle.done for handle in optimizer._pending.values()]
optimizer.store.barrier()
optimizer.settle()
found.append(model.weight.tolist())
print(json.dumps({"weights": found, "waits": waits, "over": optimizer.store._environment.transport}), flush=True)
