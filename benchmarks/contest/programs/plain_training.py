"""A hand-written PyTorch program, the reference in the training benchmark. It uses dmltrain only for its data.

The networks are those of dmltrain.models (tests/benchmarks/test_training.py checks that). The loop is optimized:
channels_last, a fused optimizer, set_to_none, in-place ReLU and sums, and values are read only to be printed.
"""

import argparse
import sys
import time

import torch
from torch import nn
from torch.nn import functional

from dmltrain import data
from dmltrain.base.normalisation import Normalisation


class Unit(nn.Module):
    """A residual unit with pre-activation (He et al. 2016), as in MXNet's resnet.py."""

    def __init__(self, inputs: int, channels: int, stride: int, project: bool) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs, eps=2e-5)
        self.conv1 = nn.Conv2d(inputs, channels, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels, eps=2e-5)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.shortcut = nn.Conv2d(inputs, channels, 1, stride, bias=False) if project else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        entered = functional.relu(self.bn1(x), inplace=True)
        y = self.conv2(functional.relu(self.bn2(self.conv1(entered)), inplace=True))
        y += x if self.shortcut is None else self.shortcut(entered)
        return y


def resnet(depth: int = 20) -> nn.Module:
    """Three stages of 16, 32 and 64 channels for small images."""
    layers: list[nn.Module] = [fixed_scale(nn.BatchNorm2d(3, eps=2e-5)), nn.Conv2d(3, 16, 3, 1, 1, bias=False)]
    inputs = 16
    for stage, channels in enumerate((16, 32, 64)):
        for unit in range((depth - 2) // 6):
            layers.append(Unit(inputs, channels, 2 if stage and not unit else 1, project=not unit))
            inputs = channels
    layers += [nn.BatchNorm2d(64, eps=2e-5), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(64, 10))


def convolution(inputs: int, channels: int, kernel: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, channels, kernel, stride, kernel // 2),
        fixed_scale(nn.BatchNorm2d(channels, eps=1e-3)),
        nn.ReLU(inplace=True),
    )


class Fork(nn.Module):
    """Two branches with the same input; their outputs are concatenated."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.first(x), self.second(x)], dim=1)


def inception() -> nn.Module:
    """MXNet's inception-bn-28-small."""
    layers: list[nn.Module] = [convolution(3, 96, 3)]
    inputs = 96
    for narrow, wide in [
        (32, 32),
        (32, 48),
        (0, 80),
        (112, 48),
        (96, 64),
        (80, 80),
        (48, 96),
        (0, 96),
        (176, 160),
        (176, 160),
    ]:
        if narrow:
            layers.append(Fork(convolution(inputs, narrow, 1), convolution(inputs, wide, 3)))
            inputs = narrow + wide
        else:
            layers.append(Fork(convolution(inputs, wide, 3, 2), nn.MaxPool2d(3, 2, ceil_mode=True)))
            inputs += wide
    return nn.Sequential(*layers, nn.AvgPool2d(7, 1), nn.Flatten(), nn.Linear(inputs, 10))


def fixed_scale(norm: nn.BatchNorm2d) -> nn.BatchNorm2d:
    norm.weight.requires_grad_(False)
    return norm


NETWORKS = {"resnet": resnet, "inception-bn-28-small": inception}


def train(
    model: nn.Module,
    batches: data.TrainBatches,
    normalisation: Normalisation,
    lr: float,
    dtype: torch.dtype,
    display: int,
    device: torch.device,
) -> None:
    model = model.to(device).to(memory_format=torch.channels_last).train()
    learned = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in learned if p.dim() > 1], "weight_decay": 1e-4},
        {"params": [p for p in learned if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.SGD(groups, lr=lr, momentum=0.9, fused=True)
    correct, loss_sum = torch.zeros((), dtype=torch.int64, device=device), torch.zeros((), device=device)
    seen, since = 0, time.perf_counter()
    for batch in batches:
        images, labels = torch.from_numpy(normalisation.apply(batch.images)), torch.from_numpy(batch.labels)
        if device.type != "cpu":
            images, labels = (each.pin_memory().to(device, non_blocking=True) for each in (images, labels))
        images = images.contiguous(memory_format=torch.channels_last)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            logits = model(images)
        loss = functional.cross_entropy(logits.float(), labels)
        loss.backward()
        optimizer.step()
        correct += (logits.detach().argmax(dim=1) == labels).sum()
        loss_sum += loss.detach() * len(labels)
        seen += len(labels)
        if batch.index and batch.index % display == 0:
            now = time.perf_counter()
            print(
                f"Epoch[0] Batch [{batch.index}]\tSpeed: {seen / (now - since):.2f} samples/sec\t"
                f"accuracy={correct.item() / seen:.6f}\tcross-entropy={loss_sum.item() / seen:.6f}",
                file=sys.stderr,
                flush=True,
            )
            correct.zero_()
            loss_sum.zero_()
            seen, since = 0, now


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--network", choices=sorted(NETWORKS), default="resnet")
    parser.add_argument("--dataset", default="synthetic")
    parser.add_argument("--data-dir")
    parser.add_argument("--num-examples", type=int)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--num-epochs", type=int, default=1)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--disp-batches", type=int, default=5)
    parser.add_argument("--gpus", help="the number of a GPU (default: the CPU)")
    options = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cpu" if options.gpus is None else f"cuda:{options.gpus}")
    model = NETWORKS[options.network]()
    found = data.load(options.dataset, options.data_dir, num_examples=options.num_examples, image_shape=(3, 28, 28))
    parts = data.Shared(len(found.train), 1, options.batch_size, len(found.train))
    for epoch in range(options.num_epochs):
        batches = data.TrainBatches(found.train, parts.part(0, 0, epoch))
        kind, display = getattr(torch, options.dtype), options.disp_batches
        train(model, batches, found.normalisation, options.lr, kind, display, device)


if __name__ == "__main__":
    main()
