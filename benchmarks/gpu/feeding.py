"""Stage "feeding": training from a .rec, against the same from memory: CIFAR-10 (25 MB), and ResNet-50 on photographs'
sizes."""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from report import CHECKOUT, INTERPRETER

from dmltrain import data
from dmltrain.data.readers.record_writer import RecordWriter
from gpu.running import Asked, Row, bar, finished

LEAST = 0.95  # of the speed with synthetic data
THREADS = (8, 1, 4, 14)  # the first one has a bar
CLASSES = 10
SPEED = re.compile(r"Speed: ([\d.]+) samples/sec")
ACCURACY, MEMORY = re.compile(r"Train-accuracy=([\d.]+)"), re.compile(r"Device-Memory=([\d.]+)")


@dataclass(frozen=True)
class Sizes:
    small_images: int  # of 32 x 32
    photographs: int
    size: int  # of a crop of a photograph
    batch: int
    depth: int
    threads: tuple[int, ...]


FULL = Sizes(50_000, 2048, 224, 256, 50, THREADS)
SMALL = Sizes(64, 24, 32, 4, 8, THREADS[:1])


def rows(asked: Asked) -> Iterator[Row]:
    try:
        import simplejpeg  # noqa: F401
    except ImportError:
        yield {"feeding": "left out: simplejpeg is not here"}
        return
    sizes = SMALL if asked.small else FULL
    with tempfile.TemporaryDirectory() as folder:
        yield from _cifar(asked, sizes, Path(folder, "cifar.rec"))
        yield from _photographs(asked, sizes, Path(folder, "photographs.rec"))


# -- records ----------------------------------------------------------------------------------------------------------


def _write(path: Path, images: Iterator[tuple[np.ndarray, int]], quality: int) -> None:
    import simplejpeg

    writer = RecordWriter(path)
    for number, (image, label) in enumerate(images):
        writer.write(float(label), number, simplejpeg.encode_jpeg(image, quality, colorspace="RGB"))
    writer.finish()


def _small_images(asked: Asked, count: int) -> Iterator[tuple[np.ndarray, int]]:
    """CIFAR-10's, or noise around a picture of its class: (32, 32, 3) uint8, and the class."""
    if asked.data_dir:
        found = data.load("cifar10", asked.data_dir, num_examples=count, image_shape=(3, 32, 32)).train
        for start in range(0, count, 100):
            images, labels = found.evaluation(np.arange(start, min(count, start + 100)))
            for image, label in zip(images, labels, strict=True):
                yield np.ascontiguousarray(image.transpose(1, 2, 0)), int(label)
        return
    draw = np.random.default_rng(0)
    patterns = draw.integers(64, 192, (CLASSES, 32, 32, 3), np.uint8)
    for label in draw.integers(0, CLASSES, count).tolist():
        yield patterns[label] + draw.integers(0, 64, (32, 32, 3), np.uint8), label


def _photographs_drawn(count: int) -> Iterator[tuple[np.ndarray, int]]:
    """Smooth noise of 375 x 500 pixels, which takes as long to decode as a photograph."""
    draw = np.random.default_rng(0)
    for number in range(count):
        coarse = draw.integers(0, 243, (25, 25, 3), np.uint8)
        image = np.repeat(np.repeat(coarse, 15, 0), 20, 1)
        yield image + draw.integers(0, 12, image.shape, np.uint8), number % CLASSES


# -- training ---------------------------------------------------------------------------------------------------------


def _cifar(asked: Asked, sizes: Sizes, path: Path) -> Iterator[Row]:
    _write(path, _small_images(asked, sizes.small_images), 95)
    words = f"--data-train {path} --network resnet --num-layers {8 if asked.small else 20} --image-shape 3,32,32"
    words += f" --batch-size {16 if asked.small else 128} --num-examples {sizes.small_images}"
    words += f" --num-epochs {1 if asked.small else 3}"
    yield {"feeding": "CIFAR-10 from a .rec", "MB": round(path.stat().st_size / 1e6, 1), **_trained(words)}


def _photographs(asked: Asked, sizes: Sizes, path: Path) -> Iterator[Row]:
    _write(path, _photographs_drawn(sizes.photographs), 90)
    shared = f"--network resnet --num-layers {sizes.depth} --image-shape 3,{sizes.size},{sizes.size}"
    shared += f" --batch-size {sizes.batch} --num-examples {sizes.photographs}"
    shared += f" --num-epochs {1 if asked.small else 3}"
    shared += "" if asked.small else " --dtype bfloat16"
    synthetic = _trained(f"{shared} --benchmark 1")
    yield {"feeding": "synthetic photographs", **synthetic}
    for threads in sizes.threads:
        found = _trained(f"{shared} --data-train {path} --random-resized-crop 1 --data-nthreads {threads}")
        yield {"feeding": f"photographs from a .rec, {threads} threads", **found}
        if threads == THREADS[0]:
            ratio = found.get("images_per_second", 0.0) / max(synthetic.get("images_per_second", 0.0), 1e-9)
            yield bar(f"feeding by {threads} threads: share of synthetic data", ratio, 1e-9 if asked.small else LEAST)


def _trained(words: str) -> Row:
    program = [*(INTERPRETER or [sys.executable]), str(CHECKOUT / "examples/train_imagenet.py")]
    fixed = f"--gpus 0 --kv-store local --num-classes {CLASSES} --disp-batches 2"
    code, text = finished([*program, *fixed.split(), *words.split()], 60.0)
    speeds, accuracies, memories = SPEED.findall(text), ACCURACY.findall(text), MEMORY.findall(text)
    if code or not speeds:
        return {"failed": f"ended with {code}: {text[-400:]}"}
    row = {"images_per_second": max(map(float, speeds))}
    if memories:
        row["MiB"] = max(map(float, memories))
    return {**row, "training accuracy": float(accuracies[-1])} if accuracies else row
