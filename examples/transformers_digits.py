"""The Trainer of Transformers, with gradients that go over dmltrain. What is new is marked (1) and (2).

python examples/transformers_digits.py                           # alone
dmltrain launch -n 2 -s 2 examples/transformers_digits.py        # over shared memory; with -H hosts over servers
"""

import dmltrain.torch.accelerate  # (1)  # isort: skip  (the processes of servers end here)

import torch
from transformers import Trainer, TrainingArguments

from dmltrain.data import load


class Digits(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))

    def forward(self, images, labels):
        logits = self.net(images)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def samples(split) -> list[dict[str, torch.Tensor]]:
    images, labels = torch.from_numpy(split.images).float().flatten(1) / 255, torch.from_numpy(split.labels)
    return [{"images": image, "labels": label} for image, label in zip(images, labels, strict=True)]


def main() -> Trainer:
    dmltrain.torch.accelerate.prepare()  # (2)
    digits = load("digits")
    arguments = TrainingArguments(
        "checkpoints",
        per_device_train_batch_size=32,
        num_train_epochs=4,
        learning_rate=2e-3,
        eval_strategy="epoch",
        save_strategy="epoch",
        report_to="none",
        disable_tqdm=True,
        seed=0,
    )
    torch.manual_seed(0)
    trainer = Trainer(
        Digits(),
        arguments,
        train_dataset=samples(digits.train),
        eval_dataset=samples(digits.validation),
        compute_metrics=lambda found: {"accuracy": float((found.predictions.argmax(1) == found.label_ids).mean())},
    )
    trainer.train()
    if trainer.is_world_process_zero():
        print(f"Validation-accuracy={trainer.state.log_history[-2]['eval_accuracy']:.4f}")
    return trainer


if __name__ == "__main__":
    main()
