"""The Trainer of Transformers, with gradients that are summed on dmltrain's servers. What is new is marked (1) and (2).

python examples/transformers_digits.py                           # alone
dmltrain launch -n 2 -s 2 examples/transformers_digits.py        # two workers, two servers
"""

import dmltrain.torch.accelerate  # (1)  # isort: skip  (the processes of servers end here)

import torch
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

from dmltrain.data import load


def samples(split) -> list[dict[str, torch.Tensor]]:
    images, labels = torch.from_numpy(split.images).float() / 255, torch.from_numpy(split.labels)
    return [{"pixel_values": image, "labels": label} for image, label in zip(images, labels, strict=True)]


def main() -> Trainer:
    dmltrain.torch.accelerate.prepare()  # (2)
    digits = load("digits")
    arguments = TrainingArguments(
        "checkpoints",
        per_device_train_batch_size=32,
        num_train_epochs=2,
        learning_rate=2e-3,
        eval_strategy="epoch",
        save_strategy="epoch",
        report_to="none",
        disable_tqdm=True,
        seed=0,
    )
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = ViTForImageClassification(ViTConfig(image_size=8, patch_size=2, num_channels=1, num_labels=10, **size))
    trainer = Trainer(
        model,
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
