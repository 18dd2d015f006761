"""The interface of readers: records by number, in any order, for several threads at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dmltrain.base.arrays import Array


@dataclass(frozen=True, eq=False)
class Record:
    """One sample as it is stored. Classification needs records with one label."""

    labels: Array  # float32 (L,), L >= 1
    image: bytes | Array  # an encoded file, or pixels uint8 (H, W, 3) RGB


def one_label(record: Record) -> float:
    """The label. ValueError: there are several, of which none is a class by itself."""
    if len(record.labels) != 1:
        raise ValueError(
            f"it has {len(record.labels)} labels, expected one (a label width of 1): several are those of detection, "
            "or of an image of several classes, and none of them is its class"
        )
    return float(record.labels[0])


class Reader(Protocol):
    """Records 0 to len - 1. Several threads call its methods at once."""

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """The classes in the order of their labels, where the format knows them."""

    def __len__(self) -> int: ...

    def read(self, index: int) -> Record:
        """Raises UserError, which names the file and the record, if it cannot be read or is damaged."""

    def where(self, index: int) -> str:
        """The record's place for messages: "train.rec: record 17 (key 42, offset 123456)"."""

    def number(self, index: int) -> int:
        """The record's own number: its key in a .rec, its number in a .lst, else `index`."""

    def digest(self) -> str:
        """sha256 of the index in hexadecimal: equal for equal data on two hosts, wherever the files lie."""


@dataclass(frozen=True)
class SampleSource:
    """What the user says about one file or folder of samples.

    index: file of its index, which is made if it is missing (default: beside `path`). root: folder of the images that a
    list names (default: the list's own). devkit: ILSVRC2012_devkit_t12.tar.gz or its folder (default: beside `path`).
    warn: takes what the user should know.
    """

    path: Path
    index: Path | None
    root: Path | None
    devkit: Path | None
    warn: Callable[[str], None]


@dataclass(frozen=True)
class Format:
    """A row of the table: `name` for messages and documents, `recognises(path)`, and `open`, which raises UserError."""

    name: str
    recognises: Callable[[Path], bool]
    open: Callable[[SampleSource], Reader]
