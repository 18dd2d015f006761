"""A small network without batch norm on a union batch that the workers share by stride; prints and saves its weights.

Arguments: kvstore, seed of random pauses before each step (0: none), file for the weights. Without DMLC_ROLE: one
process on the whole union batch, plain PyTorch.
"""

import random
import sys
import time

import numpy as np

import dmltrain

rank, workers = dmltrain.rank(), dmltrain.num_workers()  # servers stay in this line, and need no torch

import torch  # noqa: E402

from dmltrain import kvstore  # noqa: E402
from dmltrain.backends.torch import distributed as torch_distributed  # noqa: E402
from dmltrain.backends.torch import plain_step  # noqa: E402

STEPS, UNION = 12, 50  # 50 samples a step: not divisible by 4 workers


def main() -> None:
    kind, pauses, path = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    plain_step.postpone_compiler()  # its import takes longer than the steps
    torch.manual_seed(3 if rank == 0 else 99)  # all start from worker 0's weights
    model = torch.nn.Sequential(
        torch.nn.Linear(20, 700), torch.nn.ReLU(), torch.nn.Linear(700, 600), torch.nn.ReLU(), torch.nn.Linear(600, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    if kind != "plain":
        store = kvstore.create(kind)
        optimizer = torch_distributed.distribute(model, optimizer, store, average=False)
    data = np.random.default_rng(7)
    chance = random.Random(pauses * 100 + rank)
    for _ in range(STEPS):
        images = torch.from_numpy(data.standard_normal((UNION, 20), np.float32))
        labels = torch.from_numpy(data.integers(0, 10, UNION))
        if pauses:
            time.sleep(chance.random() * 0.03)
        optimizer.zero_grad()
        logits = model(images[rank::workers])
        (torch.nn.functional.cross_entropy(logits, labels[rank::workers], reduction="sum") / UNION).backward()
        optimizer.step()
    if isinstance(optimizer, torch_distributed.DistributedOptimizer):
        optimizer.synchronize()
    if rank == 0:
        np.save(path, np.concatenate([parameter.detach().numpy().ravel() for parameter in model.parameters()]))


main()
