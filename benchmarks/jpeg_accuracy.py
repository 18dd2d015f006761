"""The accuracy of training from JPEGs in .rec files against that from CIFAR-10's own files.

    python benchmarks/jpeg_accuracy.py /data/cifar10 /tmp/cifar10-rec

Packs CIFAR-10 as JPEGs of quality 95, and trains resnet-20 from both for 4 epochs with three seeds, with the same crop,
mirror, mean and std. The learning rate is a tenth in the last epoch: at a constant rate the last accuracy scatters by
points. Prints each accuracy and the means; the folder needs 200 MB.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path
from statistics import mean

from dmltrain import data
from dmltrain.data.dataset import Split
from dmltrain.data.readers.record_writer import RecordWriter
from dmltrain.data_command.encode import Encoding

ROOT = Path(__file__).resolve().parents[1]
ENCODE = Encoding(quality=95)


def pack(split: Split, path: Path) -> None:
    writer = RecordWriter(path)
    for number, (image, label) in enumerate(zip(split.images, split.labels, strict=True)):
        writer.write(float(label), number, ENCODE(image.transpose(1, 2, 0)))
    writer.finish()


def accuracy(words: list[object]) -> float:
    command = [sys.executable, ROOT / "examples" / "train_cifar10.py", "--kv-store", "local", *words]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=True)
    return float(re.findall(r"Validation-accuracy=(\S+)", done.stderr)[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cifar10", type=Path, help="folder of CIFAR-10's own files")
    parser.add_argument("folder", type=Path, help="where the .rec files are made")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--num-epochs", type=int, default=4)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    files = {"train": given.folder / "train.rec", "validation": given.folder / "val.rec"}
    found = data.load("cifar10", given.cifar10, download=False)
    for name, path in files.items():
        if not path.exists():
            split = getattr(found, name)
            assert isinstance(split, Split)
            pack(split, path)
    sources = {
        "own files": ["--data-dir", given.cifar10],
        "JPEG .rec": ["--data-train", files["train"], "--data-val", files["validation"]],
    }
    length = ["--num-epochs", given.num_epochs, "--lr-step-epochs", max(1, given.num_epochs - 1)]
    common = ["--network", "resnet", "--num-layers", 20, *length]
    for name, words in sources.items():
        each = [accuracy([*words, *common, "--seed", seed]) for seed in range(given.seeds)]
        print(f"{name}: mean {mean(each):.4f} of {', '.join(f'{one:.4f}' for one in each)}", flush=True)


if __name__ == "__main__":
    main()
