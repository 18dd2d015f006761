"""A plain PyTorch training script. dmltrain needs only the three lines marked (1) to (3).

python examples/plain_torch.py                                   # alone
dmltrain launch -n 2 -s 2 examples/plain_torch.py                # two workers, two servers
dmltrain launch -n 2 -s 2 examples/plain_torch.py dist_async
"""

import sys

import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import dmltrain  # (1)
from dmltrain.data import load


def main() -> None:
    torch.manual_seed(0)
    digits = load("digits")
    images, labels = (torch.from_numpy(x) for x in (digits.train.images, digits.train.labels))
    dataset = TensorDataset(images.float().flatten(1) / 255, labels)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = dmltrain.distribute(model, optimizer, *sys.argv[1:])  # (2)
    sampler = DistributedSampler(dataset, dmltrain.num_workers(), dmltrain.rank())  # (3)
    for epoch in range(5):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(dataset, batch_size=32, sampler=sampler):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        print(f"Epoch[{epoch}] loss={loss.item():.4f}", flush=True)
    held_out = torch.from_numpy(digits.validation.images).float().flatten(1) / 255
    right = model(held_out).argmax(1) == torch.from_numpy(digits.validation.labels)
    print(f"Validation-accuracy={right.float().mean().item():.4f}", flush=True)


if __name__ == "__main__":
    main()
