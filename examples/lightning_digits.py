"""A LightningModule whose gradients go over dmltrain. What is new is marked (1) and (2).

python examples/lightning_digits.py                           # alone
dmltrain launch -n 2 -s 2 examples/lightning_digits.py        # over shared memory; with -H hosts over servers
"""

import dmltrain.torch.lightning  # (1)  # noqa: F401  # isort: skip  (the processes of servers end here)

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from dmltrain.data import load


class Digits(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))

    def training_step(self, batch, _):
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, _):
        output = self.net(batch[0])
        self.log("loss", torch.nn.functional.cross_entropy(output, batch[1]), sync_dist=True)
        self.log("accuracy", (output.argmax(1) == batch[1]).float().mean(), sync_dist=True, prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def batches(split, **options) -> DataLoader:
    images = torch.from_numpy(split.images).float().flatten(1) / 255
    return DataLoader(TensorDataset(images, torch.from_numpy(split.labels)), batch_size=32, **options)


def main() -> L.Trainer:
    L.seed_everything(0)
    digits = load("digits")
    trainer = L.Trainer(
        strategy="dmltrain",  # (2)
        accelerator="cpu",
        max_epochs=10,
        logger=False,
        enable_progress_bar=False,
        callbacks=[EarlyStopping("loss", min_delta=0.01, patience=1), ModelCheckpoint("checkpoints", monitor="loss")],
    )
    trainer.fit(Digits(), batches(digits.train, shuffle=True), batches(digits.validation))
    print(f"Validation-accuracy={trainer.callback_metrics['accuracy']:.4f} after {trainer.current_epoch} epochs")
    return trainer


if __name__ == "__main__":
    main()
