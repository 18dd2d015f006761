"""Image lists, as MXNet's tools/im2rec.py writes them: number, label and path of each image, separated by tabs."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dmltrain.base import whole_file
from dmltrain.base.errors import UserError

EXTENSIONS = (".jpeg", ".jpg", ".png")
SHUFFLE_SEED = 100  # im2rec's, with Python's own generator: the same order


@dataclass(frozen=True)
class Item:
    """One image: `path` is relative to the root."""

    number: int
    path: str
    label: int


@dataclass(frozen=True)
class ListDivision:
    """How a list is divided. The ratios are fractions of each chunk; what neither takes is for validation."""

    chunks: int = 1
    train_ratio: float = 1.0
    test_ratio: float = 0.0

    def __post_init__(self) -> None:
        if self.chunks < 1:
            raise UserError(f"--chunks {self.chunks}: expected 1 or more")
        for option, ratio in (("--train-ratio", self.train_ratio), ("--test-ratio", self.test_ratio)):
            if not 0 <= ratio <= 1:
                raise UserError(f"{option} {ratio:g}: expected a fraction from 0 to 1")
        if self.train_ratio + self.test_ratio > 1 + 1e-9:
            raise UserError(
                f"--train-ratio {self.train_ratio:g} and --test-ratio {self.test_ratio:g}: expected at most 1 together"
            )


def find(root: Path, recursive: bool, extensions: Sequence[str] = EXTENSIONS) -> list[Item]:
    """The images in `root`, with label 0; `recursive`: in all its folders, one class for each folder, by name.

    UserError: there is none.
    """
    allowed = {extension.lower() for extension in extensions}
    if not root.is_dir():
        raise UserError(f"{root}: not a folder; expected the root folder of the images")
    walk = _walk(root, allowed) if recursive else ((path, 0) for path in _images(root, allowed))
    items = [Item(number, str(path.relative_to(root)), label) for number, (path, label) in enumerate(walk)]
    if not items:
        fix = "" if recursive else "; --recursive also looks into its folders"
        raise UserError(f"{root}: no image with one of the endings {' '.join(sorted(allowed))}{fix}")
    return items


def shuffled(items: Sequence[Any]) -> list[Any]:
    """The items in im2rec's random order, which is always the same."""
    order = list(items)
    random.Random(SHUFFLE_SEED).shuffle(order)
    return order


def write(prefix: Path, items: Sequence[Item], parts: ListDivision) -> list[Path]:
    """Write PREFIX.lst, or with several parts PREFIX_0_train.lst and so on. Returns the files."""
    written = []
    size = -(-len(items) // parts.chunks)
    for chunk in range(parts.chunks):
        here = items[chunk * size : (chunk + 1) * size]
        stem = f"{prefix}_{chunk}" if parts.chunks > 1 else str(prefix)
        for ending, part in _divided(here, size, parts):
            path = Path(f"{stem}{ending}.lst")
            whole_file.write(path, "".join(map(_line, part)).encode("utf-8", "surrogateescape"))
            written.append(path)
    return written


def _divided(items: Sequence[Item], size: int, parts: ListDivision) -> list[tuple[str, Sequence[Item]]]:
    if parts.train_ratio == 1.0:
        return [("", items)]
    test = int(size * parts.test_ratio)
    train = test + int(size * parts.train_ratio)
    divided = [("_test", items[:test])] if test else []
    if parts.train_ratio + parts.test_ratio < 1.0:
        divided.append(("_val", items[train:]))
    return [*divided, ("_train", items[test:train])]


def _line(item: Item) -> str:
    if "\t" in item.path or "\n" in item.path:
        raise UserError(f"{item.path!r}: a list cannot have a tab or line break in a name; rename this file")
    return f"{item.number}\t{item.label:f}\t{item.path}\n"


def _images(folder: Path, allowed: set[str]) -> Iterator[Path]:
    for name in sorted(os.listdir(folder)):
        if os.path.splitext(name)[1].lower() in allowed and (folder / name).is_file():
            yield folder / name


def _walk(root: Path, allowed: set[str]) -> Iterator[tuple[Path, int]]:
    label, seen = 0, set()
    for folder, folders, _ in os.walk(root, followlinks=True):
        here = os.stat(folder)
        if (here.st_dev, here.st_ino) in seen:  # a link to a folder above would lead round in a circle
            folders.clear()
            continue
        seen.add((here.st_dev, here.st_ino))
        folders.sort()
        images = list(_images(Path(folder), allowed))
        yield from ((path, label) for path in images)
        label += bool(images)
