"""A script of the form of torchvision's references/classification: a sampler, sums of metrics."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.utils.data
from torch import nn


def init_distributed_mode(args):
    args.rank, args.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        backend=args.dist_backend, init_method=args.dist_url, world_size=args.world_size, rank=args.rank
    )
    dist.barrier()


def reduce_across_processes(val):
    t = torch.tensor(val)
    dist.barrier()
    dist.all_reduce(t)
    return t


def main(args):
    init_distributed_mode(args)
    torch.manual_seed(0)
    images = torch.randn(64, 3, 16, 16)
    dataset = torch.utils.data.TensorDataset(images, (images.mean((1, 2, 3)) > 0).long())
    sampler = torch.utils.data.distributed.DistributedSampler(dataset)
    loader = torch.utils.data.DataLoader(dataset, batch_size=8, sampler=sampler)
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(2048, 256)]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers, nn.ReLU(), nn.Linear(256, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        total, correct = 0.0, 0
        for image, target in loader:
            output = model(image)
            loss = nn.functional.cross_entropy(output, target, label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total, correct = total + loss.item(), correct + (output.argmax(1) == target).sum().item()
        total, correct = reduce_across_processes(total).item(), reduce_across_processes(correct).item()
        if args.rank == 0:
            print(f"epoch {epoch}: loss {total:.6f} correct {correct}")
    dist.destroy_process_group()


parser = argparse.ArgumentParser()
parser.add_argument("--epochs", default=2, type=int)
parser.add_argument("--dist-url", default="env://")
parser.add_argument("--dist-backend", default="nccl")
main(parser.parse_args())
