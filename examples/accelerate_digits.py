"""A script with Accelerate whose gradients go over dmltrain. What is new is marked (1) and (2).

python examples/accelerate_digits.py                           # alone
dmltrain launch -n 2 -s 2 examples/accelerate_digits.py        # over shared memory; with -H hosts over servers
"""

import dmltrain.torch.accelerate  # (1)  # isort: skip  (the processes of servers end here)

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

from dmltrain.data import load


def batches(split, **options) -> DataLoader:
    images = torch.from_numpy(split.images).float().flatten(1) / 255
    return DataLoader(TensorDataset(images, torch.from_numpy(split.labels)), batch_size=32, **options)


def main() -> Accelerator:
    dmltrain.torch.accelerate.prepare()  # (2)
    accelerator = Accelerator()
    torch.manual_seed(0)
    digits = load("digits")
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer, training, validation = accelerator.prepare(
        model, optimizer, batches(digits.train, shuffle=True), batches(digits.validation)
    )
    for epoch in range(5):
        model.train()
        for images, labels in training:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        model.eval()
        with torch.no_grad():
            right = [accelerator.gather_for_metrics(model(x).argmax(1) == y) for x, y in validation]
        accelerator.print(f"Epoch[{epoch}] Validation-accuracy={torch.cat(right).float().mean():.4f}")
    accelerator.save_state("checkpoint")
    return accelerator


if __name__ == "__main__":
    main()
