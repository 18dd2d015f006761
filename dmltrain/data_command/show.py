"""`dmltrain-data show`: a sheet of the first batch as the network sees it, after augmentation, with labels."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import numpy as np

from dmltrain.base.arrays import Array
from dmltrain.base.errors import UserError
from dmltrain.data.batches import EvalBatches
from dmltrain.data.images.libraries import library
from dmltrain.data_command import described
from dmltrain.data_command.say import say

HELP = "draw a batch as the network sees it after augmentation, with labels"
EXAMPLES = """examples:
  dmltrain-data show --data-train train.rec --random-resized-crop 1 --min-random-area 0.08 --random-mirror 1
  dmltrain-data show --data-train train.rec --aug-level 3 --batch-size 64 --out level3.png
  dmltrain-data show --dataset cifar10 --evaluation

All options of the training programs that concern data are taken.
"""
TRAINING_OPTIONS = True
BATCH_SIZE = 32
LEAST = 96  # pixels of a tile's edge: smaller images are enlarged by a whole number
CAPTION, GAP = 14, 4  # pixels


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=Path("sheet.png"), metavar="FILE", help="default: sheet.png")
    parser.add_argument("--evaluation", action="store_true", help="the validation images, without augmentation")
    parser.add_argument(
        "--class-names", type=Path, metavar="FILE", help="a line for each class, such as synset_words.txt"
    )


def run(arguments: argparse.Namespace) -> int:
    given = described.parsed(arguments.rest, "show", batch_size=BATCH_SIZE)
    names = _names(arguments.class_names)
    dataset = described.opened(given)
    if arguments.evaluation:
        if not len(dataset.validation):
            raise UserError("--evaluation: there are no validation data; give --data-val")
        samples = np.arange(min(given.batch_size, len(dataset.validation)))
        batch = next(iter(EvalBatches(dataset.validation, samples, given.batch_size)))
    else:
        batch = next(iter(described.batches(given, dataset, 1)))
    if not len(batch.labels):
        raise UserError("all images of the batch are broken: dmltrain-data verify lists broken images")
    captions = [names.get(int(label), str(label)) for label in batch.labels]
    try:
        sheet(batch.images, captions).save(arguments.out)
    except ValueError as error:  # Pillow: an unknown ending
        raise UserError(f"--out {arguments.out}: {error}; expected an ending such as .png or .jpg") from None
    say(f"{arguments.out}: {len(captions)} images of {'x'.join(map(str, dataset.image_shape))}")
    return 0


def sheet(images: Array, captions: list[str]) -> Any:
    """A PIL.Image with all images, uint8 (N, C, H, W), in rows."""
    height, width = images.shape[2:]
    enlarged = max(1, math.ceil(LEAST / max(height, width)))
    across = math.ceil(math.sqrt(len(images)))
    down = math.ceil(len(images) / across)
    tile = (width * enlarged + GAP, height * enlarged + CAPTION + GAP)
    canvas = library("PIL.Image").new("RGB", (across * tile[0] + GAP, down * tile[1] + GAP), "white")
    pen = library("PIL.ImageDraw").Draw(canvas)
    for number, (image, caption) in enumerate(zip(images, captions, strict=True)):
        left, top = GAP + number % across * tile[0], GAP + number // across * tile[1]
        pixels = image.transpose(1, 2, 0).repeat(enlarged, 0).repeat(enlarged, 1)
        pixels = np.ascontiguousarray(np.broadcast_to(pixels, (*pixels.shape[:2], 3)))
        canvas.paste(library("PIL.Image").fromarray(pixels), (left, top))
        pen.text((left, top + height * enlarged + 1), _fitting(pen, caption, width * enlarged), fill="black")
    return canvas


def _fitting(pen: Any, text: str, width: int) -> str:
    """As much of the text as the width allows."""
    while len(text) > 1 and pen.textlength(text) > width:
        text = text[:-1]
    return text


def _names(path: Path | None) -> dict[int, str]:
    if path is None:
        return {}
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise UserError(f"--class-names {path}: {error.strerror or error}") from None
    return {label: f"{label} {line.strip().partition(' ')[2] or line.strip()}" for label, line in enumerate(lines)}
