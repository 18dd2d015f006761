"""A script of the form of timm's train.py: init_process_group() of a helper, reduced losses, an average of weights."""

import copy
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as NativeDDP


def init_distributed_device():
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if world_size > 1:
        dist.init_process_group(init_method="env://")
    return dist.get_rank() if world_size > 1 else 0, world_size


def reduce_tensor(tensor, n):
    dist.all_reduce(rt := tensor.clone(), op=dist.ReduceOp.SUM)
    return rt / n


def distribute_bn(model, world_size):
    for name, buffer in model.named_buffers():
        if "running_mean" in name or "running_var" in name:
            dist.all_reduce(buffer, op=dist.ReduceOp.SUM)
            buffer /= float(world_size)


def main():
    rank, world_size = init_distributed_device()
    torch.manual_seed(42)
    layers = [nn.Linear(256, 1024), nn.BatchNorm1d(1024), nn.GELU(), nn.Linear(1024, 256), nn.Linear(256, 10)]
    model = nn.Sequential(*layers)
    average = copy.deepcopy(model)
    model = NativeDDP(model, static_graph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    torch.manual_seed(42 + rank)
    for epoch in range(2):
        for _ in range(2):
            samples, targets = torch.randn(8, 256), torch.randint(0, 10, (8,))
            loss = nn.functional.cross_entropy(model(samples), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for one, other in zip(average.parameters(), model.module.parameters(), strict=True):
                    one.lerp_(other, 0.1)
        distribute_bn(model, world_size)
        reduced = reduce_tensor(loss.data, world_size)
        dist.barrier()
        if rank == 0:
            print(f"Train: {epoch} loss {reduced.item():.6f} ema {sum(map(torch.sum, average.parameters())):.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
