"""Images per processor second from JPEGs to batches of 224x224, for each random change: dmltrain and torchvision's v2.

One process and one thread. The systems take turns, a turn is a pass over the file, and figures are medians over turns.
Seconds are those of the processor, so that they hold on a busy machine. torchvision changes Pillow's images, or decoded
tensors, in uint8 batches as DataLoader makes them; ratios are to the faster of the two. torchvision.io decodes tensors,
or Pillow, where that has no library; they are resized without antialiasing, as in dmltrain. Changes follow a random
resized crop and mirroring. A function of tensors stands for colour noise, which torchvision does not have. Mixup and
cutmix are of float32 batches.

    python benchmarks/augmentation.py --data-train train.rec [--turns 9] [--cases ...] [--format table|json]
"""

from __future__ import annotations

import argparse
import importlib
import io
import itertools
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import torch
from images import BATCH, COLOURS, CROP, SHAPE, dmltrain_epochs
from PIL import Image
from report import facts, fail, installed, show, spread

from dmltrain.backends.torch.recipe import mixed
from dmltrain.base.errors import UserError
from dmltrain.data.images import ImageAugmentation
from dmltrain.data.images.colour import colour_noise
from dmltrain.data.images.decode import open_image
from dmltrain.data.images.draws import RandomNumbers
from dmltrain.data.images.mixing import drawn
from dmltrain.data.readers import open_reader

Pass = Callable[[], int]  # returns how many images it made
OURS, PIL, TENSORS = "dmltrain", "PIL images", "tensors"
LIBRARIES = ("torch", "torchvision", "pillow", "simplejpeg", "opencv-python-headless")
EDGE, MIXED = SHAPE[1], 64
JITTER = {name: COLOURS[name] for name in ("brightness", "contrast", "saturation")}
NOISE = {"pca_noise": COLOURS["pca_noise"]}


@dataclass(frozen=True)
class Torchvision:
    """v2: its transforms. decoders: from a file to what each of its two ways changes. about: what decodes tensors."""

    v2: Any
    decoders: dict[str, Callable[[bytes], Any]]
    about: str


@dataclass(frozen=True)
class Files:
    """The records at `path`, and the images in them."""

    path: str
    images: list[bytes]

    def each(self, call: Callable[[bytes], object]) -> Pass:
        return lambda: sum(call(image) is not None for image in self.images)

    def batches(self, call: Callable[[bytes], torch.Tensor]) -> Pass:
        parts = [self.images[at : at + BATCH] for at in range(0, len(self.images), BATCH)]
        return lambda: sum(len(torch.stack([call(image) for image in part])) for part in parts)


Case = Callable[[Files, "Torchvision | None"], dict[str, Pass]]  # what each system does in a turn
Steps = Callable[[Any], list[Any]]  # from v2 to its transforms


def decoding(files: Files, other: Torchvision | None) -> dict[str, Pass]:
    ours = files.each(lambda image: open_image(image).decode(3, 1))
    return {OURS: ours} | {name: files.each(decode) for name, decode in (other.decoders if other else {}).items()}


def changed(files: Files, other: Torchvision | None, steps: Steps) -> dict[str, Pass]:
    """What torchvision does in `steps`, which have PILToTensor among them."""
    if other is None:
        return {}
    both = {PIL: steps(other.v2), TENSORS: [s for s in steps(other.v2) if not isinstance(s, other.v2.PILToTensor)]}

    def made(name: str) -> Pass:
        decode, change = other.decoders[name], other.v2.Compose(both[name])
        return files.batches(lambda image: change(decode(image)))

    return {name: made(name) for name in both}


def validation(files: Files, other: Torchvision | None) -> dict[str, Pass]:
    epochs = dmltrain_epochs(files.path, ImageAugmentation(resize=256), 1, training=False)
    peers = changed(files, other, lambda v2: [v2.Resize(256, antialias=False), v2.CenterCrop(EDGE), v2.PILToTensor()])
    return {OURS: lambda: next(epochs), **peers}


def training(fields: dict[str, Any], changes: Steps = lambda v2: [], late: bool = False) -> Case:
    """fields: of ImageAugmentation. late: torchvision changes tensors only."""

    def steps(v2: Any) -> list[Any]:
        crop = [v2.RandomResizedCrop(EDGE, antialias=False), v2.RandomHorizontalFlip()]
        return [*crop, v2.PILToTensor(), *changes(v2)] if late else [*crop, *changes(v2), v2.PILToTensor()]

    def made(files: Files, other: Torchvision | None) -> dict[str, Pass]:
        epochs = dmltrain_epochs(files.path, ImageAugmentation(**CROP, **fields), 1)
        return {OURS: lambda: next(epochs), **changed(files, other, steps)}

    return made


def noisy(image: torch.Tensor) -> torch.Tensor:
    noise = colour_noise(ImageAugmentation(**NOISE), RandomNumbers(int(torch.randint(1 << 62, ()))))
    return (image + torch.from_numpy(np.floor(noise).astype(np.int16))[:, None, None]).clamp_(0, 255).to(torch.uint8)


def mixing(option: str, alpha: float, name: str) -> Case:
    """name: of torchvision's class."""
    settings = SimpleNamespace(**{"mixup": 0.0, "cutmix": 0.0, option: alpha}, mixup_prob=1.0, mixup_switch_prob=0.5)

    def made(files: Files, other: Torchvision | None) -> dict[str, Pass]:
        batch, labels, words = torch.rand(MIXED, *SHAPE), torch.arange(MIXED), itertools.count(1)
        passes = {OURS: lambda: len(mixed(batch, drawn(settings, SHAPE[1:], RandomNumbers(next(words)))))}
        if other:
            mix = getattr(other.v2, name)(alpha=alpha, num_classes=1000)
            passes[TENSORS] = lambda: len(mix(batch, labels)[0])
        return passes

    return made


CASES: dict[str, Case] = {
    "decoding": decoding,
    "centre crop of 256": validation,
    "resized crop, mirror": training({}),
    "rotation, shear": training(
        {"max_random_rotate_angle": 10, "max_random_shear_ratio": 0.1},
        lambda v2: [v2.RandomAffine(10, shear=5.7, interpolation=v2.InterpolationMode.BILINEAR, fill=127)],
    ),
    "brightness, contrast, saturation": training(JITTER, lambda v2: [v2.ColorJitter(*JITTER.values())]),
    "hue, saturation, lightness": training(
        {"max_random_h": 36, "max_random_s": 51, "max_random_l": 51},
        lambda v2: [v2.ColorJitter(brightness=0.2, saturation=0.2, hue=0.2)],
    ),
    "colour noise": training(NOISE, lambda v2: [v2.Lambda(noisy)], late=True),
    "AutoAugment": training({"auto_augment": "imagenet"}, lambda v2: [v2.AutoAugment()]),
    "RandAugment": training({"auto_augment": "randaugment"}, lambda v2: [v2.RandAugment()]),
    "TrivialAugment": training({"auto_augment": "trivialaugment"}, lambda v2: [v2.TrivialAugmentWide()]),
    "random erasing": training({"random_erasing": 0.25}, lambda v2: [v2.RandomErasing(0.25)], late=True),
    "mixup": mixing("mixup", 0.2, "MixUp"),
    "cutmix": mixing("cutmix", 1.0, "CutMix"),
}


def pil(image: bytes) -> Any:
    return Image.open(io.BytesIO(image)).convert("RGB")


def torchvision(image: bytes) -> Torchvision | None:
    """None: it cannot be imported. `image`: a JPEG to try its decoder with."""
    try:
        v2, files = (importlib.import_module(f"torchvision.{name}") for name in ("transforms.v2", "io"))
    except (ImportError, RuntimeError):  # RuntimeError: of a torch that it was not built for
        return None

    def own(image: bytes) -> Any:
        return files.decode_jpeg(torch.frombuffer(bytearray(image), dtype=torch.uint8), files.ImageReadMode.RGB)

    try:
        own(image)
    except (AttributeError, RuntimeError):  # without the library of its decoders
        return Torchvision(v2, {PIL: pil, TENSORS: lambda image: v2.functional.pil_to_tensor(pil(image))}, "Pillow")
    return Torchvision(v2, {PIL: pil, TENSORS: own}, "torchvision.io")


def rate(one: Pass) -> float:
    """Images per processor second."""
    start = time.process_time()
    images = one()
    return images / (time.process_time() - start)


def row(case: str, passes: dict[str, Pass], turns: int) -> dict[str, Any]:
    """Medians of each system, and of the ratios in each turn to the faster of the others; the first turn warms up."""
    found = [{name: rate(one) for name, one in passes.items()} for _ in range(1 + turns)][1:]
    each = {name: spread([turn[name] for turn in found]) for name in passes}
    faster = max((name for name in each if name != OURS), key=lambda name: each[name]["median"], default=None)
    ratio = statistics.median(turn[OURS] / turn[faster] for turn in found) if faster else None
    return {"case": case, "images_per_cpu_second": each, "faster": faster, "ratio": ratio}


def report(arguments: argparse.Namespace) -> dict[str, Any]:
    """All figures and the conditions of the measurement, as JSON values. UserError: there is no such file."""
    reader = open_reader(arguments.data_train)
    files = Files(arguments.data_train, [reader.read(number).image for number in range(len(reader))])
    other = torchvision(files.images[0])
    rows = [row(case, CASES[case](files, other), arguments.turns) for case in arguments.cases]
    versions = {name: installed(name) for name in ("dmltrain", *LIBRARIES)}
    return {**facts("augmentation.py", None, versions), "tensors": other.about if other else None, "rows": rows}


def table(result: dict[str, Any]) -> str:
    """The report as text."""
    peer = f"tensors decoded by {result['tensors']}" if result["tensors"] else "torchvision is missing: pip install it"
    lines = [
        f"{result['machine']['processor']}; images per processor second to {EDGE}x{EDGE}, medians; {peer}",
        "",
        f"{'':34}{OURS:>10}{PIL:>12}{TENSORS:>10}{'ratio to the faster':>21}",
    ]
    for each in result["rows"]:
        rates = each["images_per_cpu_second"]
        cells = [f"{rates[name]['median']:.0f}" if name in rates else "" for name in (OURS, PIL, TENSORS)]
        ratio = f"{each['ratio']:.2f}" if each["ratio"] else ""
        lines.append(f"{each['case']:34}{cells[0]:>10}{cells[1]:>12}{cells[2]:>10}{ratio:>21}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-train", required=True, metavar="FILE.rec")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--format", choices=["table", "json"], default="table")
    arguments = parser.parse_args(argv)
    try:
        show(report(arguments), arguments.format, table)
    except UserError as error:
        return fail("augmentation.py", error)
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    cv2.setNumThreads(1)
    warnings.filterwarnings("ignore", "Anti-alias option")  # Pillow always has it
    sys.exit(main())
