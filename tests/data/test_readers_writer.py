"""What the writer of records writes is what MXNet's own writer writes, and a killed writer's file can be continued."""

import os
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmltrain.data.readers import open_reader, recordio
from dmltrain.data.readers.record_writer import RecordWriter

MAGIC = recordio.MAGIC
contents = st.lists(
    st.one_of(st.binary(max_size=9), st.sampled_from([MAGIC, MAGIC * 2, MAGIC[:3], b"\0\0\0" + MAGIC])), max_size=6
).map(b"".join)
labels = st.one_of(
    st.integers(0, 21840),
    st.floats(width=32, allow_nan=False),
    st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=5),
)


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
    writer = RecordWriter(tmp_path / "a.rec")
    writer.write(np.float32(3), 0, b"image")
    writer.write(np.int64(4), 1, b"image")
    writer.finish()
    assert [struct.unpack("<I", (tmp_path / "a.rec").read_bytes()[at : at + 4])[0] for at in (8, 48)] == [0, 0]


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
