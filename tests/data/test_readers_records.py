"""RecordIO: what MXNet wrote is read as MXNet reads it, with an index and without; what the writer writes is what
MXNet's own writer writes."""

import errno
import json
import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmltrain.base.errors import UserError
from dmltrain.data.readers import open_reader, record_index, recordio
from dmltrain.data.readers.data_file import DataFile
from dmltrain.data.readers.record_index import RecordIndex
from dmltrain.data.readers.record_reader import RecordReader
from dmltrain.data.readers.record_writer import RecordWriter
from tests.archives import little_memory
from tests.descriptors import descriptors


@pytest.fixture(params=["sample", "sample-256"])
def written_by_mxnet(request: pytest.FixtureRequest, mxnet_files: Path) -> Path:
    """A .rec of 215 images, its .idx beside it."""
    return mxnet_files / f"{request.param}.rec"


def copy(record_file: Path, folder: Path) -> Path:
    return Path(shutil.copy(record_file, folder / "train.rec"))


def test_a_missing_index_is_rebuilt_as_mxnet_wrote_it_and_several_files_follow_each_other(
    written_by_mxnet, tmp_path, mxnet_files
):
    path = copy(written_by_mxnet, tmp_path)
    rebuilt = open_reader(path)
    idx = tmp_path / "train.idx"
    assert idx.read_bytes() == written_by_mxnet.with_suffix(".idx").read_bytes()
    assert rebuilt.digest() == open_reader(path).digest() == open_reader(written_by_mxnet).digest()
    paths = [mxnet_files / "sample.rec", mxnet_files / "sample-256.rec"]
    both, each = open_reader(paths), [open_reader(path) for path in paths]
    assert len(both) == 430
    for number in (0, 214, 215, 429):
        reader, local = each[number // 215], number % 215
        assert both.read(number).image == reader.read(local).image
        assert both.where(number) == reader.where(local)
    assert both.digest() == open_reader(paths).digest() != open_reader(paths[::-1]).digest()


# -- a small file of our own ------------------------------------------------------------------------------------------

IMAGES = [b"first", b"second " + recordio.MAGIC * 3, b"", b"fourth", b"fifth"]


def written(path: Path, *rows: tuple) -> Path:
    """A file of these records, each a label, a key and an image; its index beside it."""
    writer = RecordWriter(path)
    for row in rows:
        writer.write(*row)
    writer.finish()
    return path


@pytest.fixture
def records(tmp_path: Path) -> Path:
    """Five records, with keys 10 to 14 and labels 0 to 4; the second has two labels and the magic number in it."""
    rows = [([number, 0.5] if number == 1 else number, 10 + number, image) for number, image in enumerate(IMAGES)]
    return written(tmp_path / "train.rec", *rows)


def offsets(path: Path) -> list[int]:
    return [int(line.split()[1]) for line in path.with_suffix(".idx").read_text().splitlines()]


def test_records_are_the_same_with_an_index_in_another_order_or_with_line_ends_of_windows(records):
    reader = open_reader(records)
    assert [reader.read(number).image for number in range(5)] == IMAGES
    assert reader.read(1).labels.tolist() == [1, 0.5] and reader.read(4).labels.tolist() == [4]
    assert reader.where(3) == f"{records}: record 3 (key 13, offset {offsets(records)[3]})"
    digest, idx = open_reader(records).digest(), records.with_suffix(".idx")
    idx.write_bytes(b"".join(reversed(idx.read_bytes().splitlines(keepends=True))).replace(b"\n", b"\r\n").rstrip())
    reader = open_reader(records)
    assert reader.digest() == digest
    assert [reader.read(number).image for number in range(5)] == IMAGES
    assert "key 13" in reader.where(3)


def test_keys_count_where_the_index_says_nothing_else(records):
    idx = records.with_suffix(".idx")
    for first in (0, 10**17):
        idx.write_text("".join(f"{first + number}\t{offset}\n" for number, offset in enumerate(offsets(records))))
        assert f"(key {first + 4}, " in open_reader(records).where(4)
    written(records, *((0, key, b"image") for key in (3, 3, 2**60)))
    idx.unlink()
    assert "record 2 (key 2," in open_reader(records).where(2), "two records have the same number"


def test_an_index_elsewhere_is_read_or_made_there_or_in_memory(records, tmp_path):
    records.with_suffix(".idx").rename(tmp_path / "other.idx")
    assert len(open_reader(records, index=tmp_path / "other.idx")) == 5
    open_reader(records, index=tmp_path / "new.idx")
    assert (tmp_path / "new.idx").read_bytes() == (tmp_path / "other.idx").read_bytes()
    assert not records.with_suffix(".idx").exists()
    with pytest.raises(UserError, match="new.idx is given for 2 files"):
        open_reader([records, records], index=tmp_path / "new.idx")
    warnings, nowhere = [], tmp_path / "missing" / "train.idx"
    assert open_reader(records, index=nowhere, warn=warnings.append).read(3).image == IMAGES[3]
    assert len(warnings) == 1 and f"{nowhere}: cannot be written: No such file" in warnings[0]


# -- bad input --------------------------------------------------------------------------------------------------------


def damage(path: Path, offset: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)


def refused(path: Path | list[Path], *words: str, **arguments) -> str:
    """The error of opening it, which has these words."""
    with pytest.raises(UserError) as caught:
        open_reader(path, **arguments)
    for word in words:
        assert word in str(caught.value), str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("indexed", [True, False])
@pytest.mark.parametrize("cut", [1, 30, 36])
def test_a_truncated_file_is_refused_at_the_start(records, cut, indexed):
    starts, idx = offsets(records), records.with_suffix(".idx")
    os.truncate(records, records.stat().st_size - cut)
    if not indexed:
        idx.unlink()
    damaged = str(idx if indexed else records)
    refused(records, damaged, "record 4", "truncated", f"offset {starts[4]}", "copy or pack it again")
    assert idx.exists() == indexed  # nothing is kept of a damaged file
    for record in (4, 1, 0) if indexed else ():  # cut between two records, it is shorter than its index
        os.truncate(records, starts[record])
        refused(records, "train.idx", "record 4", "train.rec", "truncated", "copy or pack it again")


def test_a_wrong_magic_number_in_the_middle(records):
    offset = offsets(records)[3]
    reader = open_reader(records)
    damage(records, offset, b"JPEG")
    where = re.escape(f"{records}: record 3 (key 13, offset {offset})")
    with pytest.raises(UserError, match=f"{where}.*0x4745504a.*0xced7230a.*again"):
        reader.read(3)
    assert reader.read(4).image == IMAGES[4]
    records.with_suffix(".idx").unlink()
    refused(records, "record 3", f"offset {offset}", "magic number 0xced7230a")


@pytest.mark.parametrize("flag", [1, 2, 3, 5])
def test_a_flag_that_cannot_be_there(records, flag):
    reader, offset = open_reader(records), offsets(records)[3]
    damage(records, offset + 7, bytes([flag << 5]))
    with pytest.raises(UserError, match=r"record 3 .*(flag \d at offset \d+|magic number)"):
        reader.read(3)


def test_headers_that_claim_too_much_are_refused_before_anything_is_read(tmp_path):
    path, claimed = tmp_path / "train.rec", (1 << 28) + 8
    path.write_bytes(recordio.HEAD.pack(recordio.MAGIC_NUMBER, (1 << 29) - 1) + bytes(1 << 20))
    with little_memory(1 << 20):
        refused(path, "record 0", "offset 0", "claims 536870911 bytes", "1048576 follow", "pack it again")
    with path.open("wb") as file:  # parts of one record that together have more bytes than a record can have
        for number, flag in enumerate((1, 2, 3)):
            file.seek(number * (8 + claimed))
            file.write(recordio.HEAD.pack(recordio.MAGIC_NUMBER, flag << 29 | claimed))
        file.truncate(3 * (8 + claimed))
    refused(path, "record 0", "expected less than 536870912")
    heads = [recordio.HEAD.pack(recordio.MAGIC_NUMBER, flag << 29) for flag in (1, 2)]
    path.write_bytes(heads[0] + heads[1] * recordio.MAX_PARTS)
    refused(path, "record 0", "more than 65536 parts")


@pytest.mark.parametrize("content", [b"", b"\x01\0\0\0" + bytes(20), b"\xff\xff\xff\xff" + bytes(400)])
def test_a_record_without_the_labels_that_it_claims(tmp_path, content):
    path = tmp_path / "train.rec"
    path.write_bytes(b"".join(recordio.encode(content)))
    with pytest.raises(UserError, match=r"train.rec: record 0 \(key 0, offset 0\): its content has \d+ bytes"):
        open_reader(path).read(0)


def test_an_index_of_another_file(records, mxnet_files):
    for idx in ("sample.idx", "sample-256.idx"):
        refused(records, idx, "index of another file", "delete the index", index=mxnet_files / idx)
    for rec, idx in (("sample", "sample-256"), ("sample-256", "sample")):
        refused(mxnet_files / f"{rec}.rec", f"{idx}.idx", "another file", index=mxnet_files / f"{idx}.idx")
    # the content of this record is itself a file of records, so that something lies where the index says
    outer = written(records.with_name("outer.rec"), (0, 0, bytes(8) + records.read_bytes()))
    outer.with_suffix(".idx").write_text(f"0\t0\n1\t{outer.read_bytes().find(recordio.MAGIC, 8)}\n")
    refused(outer, "outer.idx", "another file")


def test_an_index_that_does_not_list_all_records_gives_a_warning_and_zeros_around_them_none(records):
    idx, lines = records.with_suffix(".idx"), records.with_suffix(".idx").read_text().splitlines(keepends=True)
    for missing in range(5):
        idx.write_text("".join(lines[:missing] + lines[missing + 1 :]))
        warnings = []
        assert len(open_reader(records, warn=warnings.append)) == 4
        assert len(warnings) == 1
        assert f"{idx}: train.rec has a record at offset {int(lines[missing].split()[1])} that" in warnings[0]
    idx.write_text("".join(lines))
    records.write_bytes(bytes(4096) + records.read_bytes() + bytes(4096))
    lines = (f"{number}\t{offset + 4096}\n" for number, offset in enumerate(offsets(records)))
    records.with_suffix(".idx").write_text("".join(lines))
    assert open_reader(records, warn=pytest.fail).read(0).image == IMAGES[0]


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        *((b"3\n", "line 4 is b'3'"), (b"3 80\n", "line 4 is b'3 80'"), (b"3\t8\r0\n", "line 4 is b'3")),
        *((b"x\t80\n", "line 4 is b'x"), (b"3\t-8\n", "line 4"), (b"3\t" + b"9" * 19 + b"\n", "line 4")),
        *((b"\t80\n", "line 4"), (b"\n", "line 4"), (b"3\t81\n", "multiples of 4")),
        (b"3\t" + b"8" * 18 + b"\n", "another file"),
        (bytes(9 << 20), "no lines of key, tab and offset"),
    ],
)
def test_an_index_with_a_line_that_cannot_be_right(records, line, shown):
    idx = records.with_suffix(".idx")
    lines = idx.read_bytes().splitlines(keepends=True)
    idx.write_bytes(b"".join(lines[:3]) + line + b"".join(lines[4:]))
    refused(records, str(idx), shown, "delete the index, and it is made again")


def test_an_index_may_list_a_record_many_times_and_is_parsed_in_several_pieces(records):
    """That is how a large data set is simulated. Of more than CHUNK bytes, lines lie across the limit of a piece; and
    one has a first piece without a line."""
    digest, idx, count = open_reader(records).digest(), records.with_suffix(".idx"), 500_000
    idx.write_text("".join(f"{number}\t{offset}\n" for number, offset in enumerate(offsets(records) * (count // 5))))
    assert idx.stat().st_size > record_index.CHUNK
    reader = open_reader(records)
    assert len(reader) == count and reader.digest() != digest
    assert [reader.read(number).image for number in range(0, count, count // 5)] == IMAGES
    with idx.open("ab") as file:
        file.write(b"7" * record_index.CHUNK * 2)
    refused(records, str(idx), "are no lines of key, tab and offset")


def test_empty_files_and_files_with_other_classes(records, tmp_path):
    (tmp_path / "images" / "cat").mkdir(parents=True)
    (tmp_path / "images" / "cat" / "a.jpg").write_bytes(b"image")
    with pytest.raises(UserError, match="1 classes, the first 'cat', and .*no names"):
        open_reader([records, tmp_path / "images"])
    records.with_suffix(".idx").write_bytes(b"")
    refused(records, "train.idx: has no line", "delete the index")
    records.write_bytes(b"")
    records.with_suffix(".idx").unlink()
    refused(records, "train.rec: has no records: the file is empty")
    assert not records.with_suffix(".idx").exists()


def test_what_is_no_file_of_samples(tmp_path):
    (tmp_path / "train.txt").write_text("cat")
    os.mkfifo(tmp_path / "pipe.rec")
    (tmp_path / "none.rec").symlink_to("/nowhere")
    for name, reason in (
        ("train.rec", "no such file"),
        ("train.txt", "unknown format; expected one of: RecordIO: .rec"),
        ("pipe.rec", "cannot be opened: not a regular file"),
        ("none.rec", "no such file or folder"),
    ):
        refused(tmp_path / name, f"{name}: {reason}")
    refused([], "no file or folder")


# -- a disk that fails ------------------------------------------------------------------------------------------------


def reader_of(path: Path, pread: Callable[[int, int, int], bytes]) -> RecordReader:
    file = DataFile(path, pread)
    return RecordReader(path, file, record_index.load(DataFile(path.with_suffix(".idx"))))


def test_a_disk_that_fails_in_mid_epoch(records):
    failed = offsets(records)[3]

    def pread(descriptor: int, count: int, offset: int) -> bytes:
        if failed <= offset:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return os.pread(descriptor, count, offset)

    reader = reader_of(records, pread)
    assert reader.read(2).image == IMAGES[2]
    with pytest.raises(UserError, match=r"train.rec: record 3 \(key 13.*Input/output error.*dmesg.*checkpoint"):
        reader.read(3)


def test_a_file_system_that_returns_less_than_it_is_asked_for_and_a_file_that_is_cut(records):
    reader = reader_of(records, lambda descriptor, count, offset: os.pread(descriptor, min(count, 3), offset))
    assert [reader.read(number).image for number in range(5)] == IMAGES
    os.truncate(records, offsets(records)[3] + 12)
    with pytest.raises(UserError, match=r"record 3 .*bytes when it was opened, .* cut it"):
        reader.read(3)


def test_several_threads_read_at_once_and_closed_files_are_closed(records):
    before = descriptors()
    for _ in range(20):
        open_reader(records).read(0)
    assert descriptors() <= before
    reader = open_reader(records)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda number: reader.read(number % 5).image, range(2000))) == IMAGES * 400


MAGIC = recordio.MAGIC
pieces = st.one_of(st.binary(max_size=9), st.sampled_from([MAGIC, MAGIC * 2, MAGIC[:3], b"\0\0\0" + MAGIC]))
contents = st.lists(pieces, max_size=6).map(b"".join)
floats = st.floats(width=32, allow_nan=False)
labels = st.one_of(st.integers(0, 21840), floats, st.lists(floats, min_size=1, max_size=5))


@given(rows=st.lists(st.tuples(labels, st.integers(0, 2**40), contents), min_size=1, max_size=5))
def test_files_are_byte_for_byte_those_of_mxnet(tmp_path_factory, rows):
    recordio = pytest.importorskip("mxnet").recordio
    folder = tmp_path_factory.mktemp("both")
    theirs = recordio.MXIndexedRecordIO(str(folder / "theirs.idx"), str(folder / "theirs.rec"), "w")
    ours = RecordWriter(folder / "ours.rec")
    for label, key, image in rows:
        theirs.write_idx(key, recordio.pack(recordio.IRHeader(0, label, key, 0), image))
        ours.write(label, key, image)
    theirs.close()
    ours.finish()
    assert sorted(os.listdir(folder)) == ["ours.idx", "ours.rec", "theirs.idx", "theirs.rec"]
    for suffix in (".rec", ".idx"):
        assert folder.joinpath("ours" + suffix).read_bytes() == folder.joinpath("theirs" + suffix).read_bytes()
    reader = open_reader(folder / "theirs.rec")
    for number, (label, _, image) in enumerate(rows):
        record = reader.read(number)
        assert record.image == image
        assert np.array_equal(record.labels, np.array(label, np.float32).reshape(-1))


def test_numbers_of_numpy_are_one_label(tmp_path):
    content = written(tmp_path / "a.rec", (np.float32(3), 0, b"image"), (np.int64(4), 1, b"image")).read_bytes()
    assert [struct.unpack("<I", content[at : at + 4])[0] for at in (8, 48)] == [0, 0]


def write(writer, numbers):
    for number in numbers:
        writer.write(number % 3, number, b"image %d" % number + MAGIC * (number % 2))


@pytest.mark.parametrize("cut", [0, 1, 43, 44, 45])
def test_a_killed_writers_file_is_continued_after_its_last_whole_record(tmp_path, cut):
    whole = RecordWriter(tmp_path / "whole.rec")
    write(whole, range(10))
    whole.finish()
    first = RecordWriter(tmp_path / "train.rec")
    write(first, range(6))
    first.close()
    part = tmp_path / "train.rec.part"
    os.truncate(part, part.stat().st_size - cut)
    assert not (tmp_path / "train.rec").exists()
    second = RecordWriter(tmp_path / "train.rec", resume=True)
    assert list(second.keys) == list(range(6 if not cut else 5 if cut <= 44 else 4))
    write(second, range(len(second.keys), 10))
    second.finish()
    for suffix in (".rec", ".idx"):
        assert tmp_path.joinpath("train" + suffix).read_bytes() == tmp_path.joinpath("whole" + suffix).read_bytes()
    assert not part.exists()


def test_without_resume_or_without_a_file_a_writer_begins_anew(tmp_path):
    for numbers in (range(9), range(3)):
        writer = RecordWriter(tmp_path / "train.rec")
        write(writer, numbers)
        writer.close()
        writer = RecordWriter(tmp_path / "train.rec", resume=False)
        write(writer, numbers)
        writer.finish()
    assert len(open_reader(tmp_path / "train.rec")) == 3
    writer = RecordWriter(tmp_path / "other.rec", resume=True)
    write(writer, range(2))
    writer.finish()
    assert len(open_reader(tmp_path / "other.rec")) == 2


@pytest.mark.thorough  # it takes a gigabyte of memory
def test_a_record_that_is_too_large_is_refused(tmp_path):
    writer = RecordWriter(tmp_path / "train.rec")
    with pytest.raises(ValueError, match="record of 536870912 bytes, expected less than 536870912"):
        writer.write(0, 0, bytes(recordio.MAX_BYTES - recordio.LABEL.size))
    write(writer, [7])
    writer.finish()
    assert open_reader(tmp_path / "train.rec").where(0).endswith("record 0 (key 7, offset 0)")


# The index of a large file of records: how long it takes to open, and how much memory it needs.
# The .rec is sparse: most of it is a hole, and the index lists the few real records in it many times.

REAL = 1000  # records, in equal distances
IMAGE = bytes(range(256)) * 4
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
        pytest.param(14_000_000, 1_600_000_000_000, True, 20, 400e6, marks=[pytest.mark.thorough, pytest.mark.alone]),
    ],
)
def test_millions_of_records_open_in_seconds_and_400_megabytes(tmp_path, count, size, shuffled, seconds, most):
    keys = np.random.default_rng(1).permutation(count) if shuffled else None
    found = opened(tmp_path, make(tmp_path, count, size, keys))
    print(found)  # as docs/image-formats.md shows it
    assert found["count"] == count and found["sizes"] == [len(IMAGE)] and f"record {count - 1} " in found["last"]
    assert found["bytes"] < most and (seconds is None or found["seconds"] < seconds), found
