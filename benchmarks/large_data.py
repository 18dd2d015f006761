"""Start and memory of a training program on data sets of up to 14 million images, the size of ImageNet-22K.

A sparse file of 1.6 TB has the records of a real .rec, spread over it; an index lists them again and again. So the disk
holds a few megabytes, and a program sees 14 million records.

    python benchmarks/large_data.py /data/sample.rec /tmp/large

The folder needs 400 MB, and a file system with sparse files. Prints a line for each size: records, seconds until the
first step and from then to the last, peak memory in MiB, and the memory of index and order.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import numpy as np

from dmltrain.data.readers import record_index, recordio
from dmltrain.data.readers.data_file import DataFile
from dmltrain.data.readers.record_index import RecordIndex

ROOT = Path(__file__).resolve().parents[1]
SIZES = (1_000, 1_281_167, 14_197_122)
BYTES = 1_600_000_000_000  # of the file of the largest size
STEPS = 100
ROOM = 4 << 20  # bytes for a record, at least


def spread(source: Path, target: Path, count: int) -> None:
    """A sparse file with the records of `source`, and an index of `count` entries that point to them."""
    file = DataFile(source)
    index = record_index.load(DataFile(source.with_suffix(".idx")))
    size = max(BYTES * count // SIZES[-1], ROOM * len(index.offsets))
    places = [size * number // len(index.offsets) // 4 * 4 for number in range(len(index.offsets))]
    with target.open("wb") as made:
        for place, offset in zip(places, index.offsets.tolist(), strict=True):
            made.seek(place)
            made.write(file.read(offset, recordio.extent(file, offset).end - offset))
        made.truncate(max(size, made.tell()))
    offsets = np.sort(np.resize(np.array(places, np.int64), count))
    lines = record_index.text(RecordIndex(offsets, None))
    with target.with_suffix(".idx").open("wb") as file_of_index:
        for piece in [lines] if isinstance(lines, bytes) else lines:
            file_of_index.write(piece)


def measured(path: Path, words: list[str]) -> tuple[float, float, float]:
    """Seconds until the first batch and from it to the end of the steps, and peak memory in MiB."""
    began = datetime.now()
    done = subprocess.run(
        [
            *(sys.executable, ROOT / "examples" / "train_imagenet.py", "--kv-store", "local", "--data-train", path),
            *("--network", "lenet", "--image-shape", "3,32,32", "--resize", "36", "--random-crop", "--random-mirror"),
            *("--batch-size", "32", "--max-iter", str(STEPS), "--disp-batches", "1", *words),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    stamps = re.findall(r"^(\S+ \S+) Node\[0\] Epoch\[\d+\] Batch", done.stderr, re.MULTILINE)
    first, last = (datetime.strptime(each, "%Y-%m-%d %H:%M:%S,%f") for each in (stamps[0], stamps[-1]))
    memory = re.findall(r"Epoch\[\d+\] Memory=(\S+)", done.stderr)
    return (first - began).total_seconds(), (last - first).total_seconds(), float(memory[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, help="a .rec with its .idx")
    parser.add_argument("folder", type=Path, help="where the sparse files are made")
    parser.add_argument("words", nargs="*", help="further options of train_imagenet.py, after --")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    least = 0.0
    print(
        "| records | first step (s) | 100 steps (s) | peak memory (MiB) | more than with 1,000 (MiB) | bytes a record |"
    )
    print("| --- | --- | --- | --- | --- | --- |")
    for count in SIZES:
        path = given.folder / f"{count}.rec"
        spread(given.source, path, count)
        start, steps, memory = measured(path, given.words)
        least = least or memory
        more = memory - least
        print(
            f"| {count:,} | {start:.1f} | {steps:.1f} | {memory:.0f} | {more:.0f} | {more * 2**20 / count:.1f} |",
            flush=True,
        )
        for made in (path, path.with_suffix(".idx")):
            made.unlink()


if __name__ == "__main__":
    main()
