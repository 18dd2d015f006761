"""A plain PyTorch training script that can resume, and that goes on when workers of its job are lost.

python examples/elastic_script.py                                               # alone
dmltrain launch -n 2 -s 2 examples/elastic_script.py                            # two workers, two servers
dmltrain launch --elastic --restart-workers 3 -n 4 -s 2 examples/elastic_script.py
"""

import argparse

import torch
from torch.utils.data import DataLoader, Subset, TensorDataset

import dmltrain
from dmltrain.data import load


def dataset(split) -> TensorDataset:
    return TensorDataset(torch.from_numpy(split.images).float() / 255, torch.from_numpy(split.labels))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--checkpoint", help="file to go on from, written after each epoch")
    parser.add_argument("--balance", action="store_true", help="elastic jobs: fewer samples for slower workers")
    parser.add_argument("--batch", default="constant", help="elastic jobs: samples of a step as workers come and go")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        *(torch.nn.Conv2d(1, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU()),
        *(torch.nn.Flatten(), torch.nn.Linear(8 * 6 * 6, 10)),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = dmltrain.distribute(model, optimizer, balance=options.balance, batch=options.batch)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=40, gamma=0.8)  # in steps
    state = dmltrain.State(model=model, optimizer=optimizer, schedule=schedule, best=0.0)

    digits = load("digits")  # after distribute: servers and the scheduler do not come here
    held_out = dataset(digits.validation)
    loader = dmltrain.loader(dataset(digits.train), batch_size=32, seed=1)

    def validate() -> list[float]:
        """Right answers, and samples, of all workers."""
        right = count = 0
        model.eval()
        with torch.no_grad():
            for images, labels in DataLoader(Subset(held_out, state.part(len(held_out))), batch_size=128):
                right += int((model(images).argmax(1) == labels).sum())
                count += len(labels)
        return state.all_reduce([right, count])

    if options.checkpoint:
        state.load(options.checkpoint)
    for epoch in state.epochs(options.epochs):
        model.train()
        for images, labels in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            schedule.step()
        right, count = state.repeat(validate)
        state.best = max(state.best, right / count)
        if options.checkpoint:
            state.save(options.checkpoint)
        print(f"Epoch[{epoch}] Validation-accuracy={right / count:.4f} best={state.best:.4f}", flush=True)
    print(f"Final weights sha256={state.digest()}", flush=True)


if __name__ == "__main__":
    main()
