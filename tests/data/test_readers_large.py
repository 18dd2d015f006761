"""The index of a large file of records: how long it takes to open, and how much memory it needs.

The .rec is sparse: most of it is a hole, and the index lists the few real records in it many times.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dmltrain.data.readers import record_index, recordio
from dmltrain.data.readers.record_index import RecordIndex

REAL = 1000  # records, in equal distances
IMAGE = bytes(range(256)) * 4
LARGE = [pytest.mark.thorough, pytest.mark.alone]
PROGRAM = """
import json, sys, time
import numpy
from dmltrain.data.readers import open_reader

def peak():  # bytes
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM:")).split()[1]) << 10

open_reader(sys.argv[1])  # imports all that is needed
before, start = peak(), time.process_time()  # other programs may take their share
reader = open_reader(sys.argv[2])
seconds = time.process_time() - start
assert len(reader.digest()) == 64
sizes = {len(reader.read(int(index)).image) for index in numpy.linspace(0, len(reader) - 1, 1000)}
last = reader.where(len(reader) - 1)
found = {"count": len(reader), "seconds": seconds, "bytes": peak() - before, "sizes": list(sizes), "last": last}
print(json.dumps(found))
"""


def make(folder: Path, count: int, size: int, keys: np.ndarray | None) -> Path:
    """train.rec, a sparse file of `size` bytes with REAL records, and train.idx with `count` entries."""
    record = b"".join(recordio.encode(recordio.pack(3.0, 7, IMAGE)))
    offsets = np.linspace(0, size - len(record), REAL).astype(np.int64) // 4 * 4
    path = folder / "train.rec"
    with path.open("wb") as file:
        file.truncate(size)
        for offset in offsets:
            file.seek(offset)
            file.write(record)
    assert os.stat(path).st_blocks * 512 < 64 << 20
    index = RecordIndex(offsets[np.arange(count) % REAL], keys)  # in turn, so that they must be put in order
    with path.with_suffix(".idx").open("wb") as file:
        file.writelines(record_index.text(index))
    return path


def opened(folder: Path, path: Path) -> dict:
    small = folder / "small"
    small.mkdir()
    make(small, REAL, 10 << 20, None)
    command = [sys.executable, "-c", PROGRAM, str(small / "train.rec"), str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("count", "size", "shuffled", "seconds", "most"),
    [
        # 20 bytes a record are for the index, and some are for parsing; 14 million records have 400 MB
        (300_000, 34 << 30, True, None, 28 * 300_000 + (24 << 20)),
        pytest.param(1_281_167, 140_000_000_000, False, 2, 400e6, marks=LARGE),  # ILSVRC12
        pytest.param(14_000_000, 1_600_000_000_000, True, 20, 400e6, marks=LARGE),
        pytest.param(14_000_000, 1_600_000_000_000, False, 20, 400e6, marks=[*LARGE, pytest.mark.exhaustive]),
    ],
)
def test_millions_of_records_open_in_seconds_and_400_megabytes(tmp_path, count, size, shuffled, seconds, most):
    keys = np.random.default_rng(1).permutation(count) if shuffled else None
    found = opened(tmp_path, make(tmp_path, count, size, keys))
    print(found)  # as docs/image-formats.md shows it
    assert found["count"] == count and found["sizes"] == [len(IMAGE)] and f"record {count - 1} " in found["last"]
    assert found["bytes"] < most and (seconds is None or found["seconds"] < seconds), found
