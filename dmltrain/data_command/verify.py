"""`dmltrain-data verify`: reads and decodes every record, and lists those that a training program could not use."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from dmltrain.base.errors import UserError
from dmltrain.base.safe_text import one_line
from dmltrain.data.images.decode import BrokenImage, check_pixels, open_image
from dmltrain.data.readers import Reader, open_reader
from dmltrain.data.readers.reader import one_label
from dmltrain.data_command.ahead import check_threads, in_order
from dmltrain.data_command.progress import progress
from dmltrain.data_command.say import say

HELP = "decode every record, and list those that cannot be used"
EXAMPLES = """examples:
  dmltrain-data verify train.rec val.rec
  dmltrain-data verify ILSVRC2012_img_train.tar --num-thread 8 > broken.txt

Exit code: 0 if all records can be used, 1 if some cannot.
"""
FAULTY = 1
_SEVERAL = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("data", nargs="+", help="files or folders of images, in any format that the programs read")
    parser.add_argument("--root", help="folder of the images that a .lst names")
    parser.add_argument("--devkit", help="ILSVRC2012_devkit_t12.tar.gz or its folder, for ILSVRC2012_img_val.tar")
    parser.add_argument("--num-classes", type=int, help="labels must be below this number")
    parser.add_argument("--num-thread", type=int, default=len(os.sched_getaffinity(0)), help="number of threads")


def run(arguments: argparse.Namespace) -> int:
    check_threads(arguments.num_thread)
    paths = [Path(path) for path in arguments.data]
    options = {"root": arguments.root, "devkit": arguments.devkit}
    return check(paths, arguments.num_thread, arguments.num_classes, **options)


def check(
    paths: Sequence[Path],
    threads: int,
    num_classes: int | None = None,
    several_labels: bool = False,
    numbers: bool = True,
    **options: str | None,
) -> int:
    """Print a line for each record that cannot be used, and report labels and numbers that look wrong. several_labels:
    they are wanted. numbers: whether to look at these. Returns the exit code."""
    reader = open_reader(paths, warn=say, **options)
    if num_classes is None and reader.class_names is not None:
        num_classes = len(reader.class_names)
    faulty, labels = 0, set[float]()
    with progress("verify", len(reader)) as advance:
        results = in_order(
            partial(_examined, reader, num_classes, several_labels=several_labels), range(len(reader)), threads
        )
        for count, (problem_of_record, label) in enumerate(results, 1):
            labels |= {label} if label is not None and len(labels) < _SEVERAL else set()
            if problem_of_record:
                faulty += 1
                print(one_line(problem_of_record), flush=True)
            advance(count)
    for note in (*_of_labels(labels, len(reader) - faulty), *(_of_numbers(reader) if numbers else [])):
        say(f"note: {note}")
    say(f"{len(reader)} records, {faulty} of them cannot be used" if faulty else f"all {len(reader)} records are good")
    return FAULTY if faulty else 0


def _of_labels(labels: set[float], count: int) -> list[str]:
    if len(labels) != 1 or count < _SEVERAL:
        return []
    return [
        f"all {count} records have the label {next(iter(labels)):g}: a network learns no classes from them; is the "
        "label in another column or file, or are the images of each class in a folder of its own?"
    ]


def _of_numbers(reader: Reader) -> list[str]:
    """By its index a .rec finds one record for each number."""
    try:
        numbers = np.fromiter((reader.number(index) for index in range(len(reader))), np.int64, len(reader))
    except UserError:  # which the lines above say
        return []
    different, counts = np.unique(numbers, return_counts=True)
    repeated = different[counts > 1]
    if not len(repeated):
        return []
    return [
        f"{len(repeated)} numbers are those of several records, the first of them {repeated[0]}, which {counts.max()} "
        "have at most: by an index only one of each is found"
    ]


def problem(reader: Reader, num_classes: int | None, index: int, several_labels: bool = False) -> str:
    """Why this record cannot be used; "" if it can."""
    return _examined(reader, num_classes, index, several_labels)[0]


def _examined(
    reader: Reader, num_classes: int | None, index: int, several_labels: bool = False
) -> tuple[str, float | None]:
    """What `problem` returns, and the label if it is good or the only problem."""
    try:
        record = reader.read(index)
    except UserError as error:
        return str(error), None
    try:
        source = open_image(record.image)
        check_pixels(source.size)  # most options decode it whole
        source.decode(3, source.max_reduction)  # all bytes are read whatever the reduction
    except BrokenImage as error:
        return f"{reader.where(index)}: {error}", None
    if several_labels:
        return "", None
    try:
        label = one_label(record)
    except ValueError as error:
        return f"{reader.where(index)}: {error}", None
    if not label.is_integer() or label < 0 or (num_classes is not None and label >= num_classes):
        expected = "a whole number from 0" + ("" if num_classes is None else f" to {num_classes - 1}")
        return f"{reader.where(index)}: its label is {label:g}, expected {expected}", label
    return "", label
