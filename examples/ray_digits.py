"""A script with Ray Train whose gradients go over dmltrain. What is new is marked (1) and (2).

python examples/ray_digits.py                   # two workers, here over shared memory, or on the cluster of RAY_ADDRESS
"""

import tempfile
from pathlib import Path

import ray.train.torch
import torch
from torch.utils.data import DataLoader, TensorDataset

import dmltrain.torch
from dmltrain.data import load
from dmltrain.torch.ray import DmltrainConfig  # (1)


def batches(split, **options) -> DataLoader:
    images = torch.from_numpy(split.images).float().flatten(1) / 255
    return DataLoader(TensorDataset(images, torch.from_numpy(split.labels)), batch_size=32, **options)


def train(config: dict) -> None:
    torch.manual_seed(0)
    digits = load("digits")
    model = torch.nn.Sequential(torch.nn.Linear(64, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 10))
    model = ray.train.torch.prepare_model(model)
    training = ray.train.torch.prepare_data_loader(batches(digits.train, shuffle=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)
    for epoch in range(config["epochs"]):
        training.sampler.set_epoch(epoch)
        for images, labels in training:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
    with torch.no_grad():
        right = [(model.module(images).argmax(1) == labels) for images, labels in batches(digits.validation)]
    accuracy = torch.cat(right).float().mean().item()
    with tempfile.TemporaryDirectory() as folder:
        torch.save(model.module.state_dict(), Path(folder, "model.pt"))
        kept = ray.train.Checkpoint.from_directory(folder) if ray.train.get_context().get_world_rank() == 0 else None
        ray.train.report({"accuracy": accuracy, "bytes": dmltrain.torch.bytes_summed()}, checkpoint=kept)


def main() -> ray.train.Result:
    trainer = ray.train.torch.TorchTrainer(
        train,
        train_loop_config={"lr": 0.05, "epochs": 3},
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        torch_config=DmltrainConfig(),  # (2)
        run_config=ray.train.RunConfig(storage_path=str(Path("ray").resolve())),
    )
    return trainer.fit()


if __name__ == "__main__":
    print("metrics", main().metrics)
