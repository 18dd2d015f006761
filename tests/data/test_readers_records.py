"""RecordIO: what MXNet wrote is read as MXNet reads it, with an index and without."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from dmltrain.data.readers import open_reader
from dmltrain.errors import UserError


@pytest.fixture(params=["sample", "sample-256"])
def written_by_mxnet(request: pytest.FixtureRequest, mxnet_files: Path) -> Path:
    """A .rec of 215 images, its .idx beside it."""
    return mxnet_files / f"{request.param}.rec"


def copy(record_file: Path, folder: Path) -> Path:
    return Path(shutil.copy(record_file, folder / "train.rec"))


def test_records_are_those_that_mxnet_reads(written_by_mxnet):
    mxnet = pytest.importorskip("mxnet")
    idx, rec = str(written_by_mxnet.with_suffix(".idx")), str(written_by_mxnet)
    theirs = mxnet.recordio.MXIndexedRecordIO(idx, rec, "r")
    ours = open_reader(rec)
    assert len(ours) == len(theirs.keys) == 215
    for number, key in enumerate(theirs.keys):
        header, image = mxnet.recordio.unpack(theirs.read_idx(key))
        record = ours.read(number)
        assert record.image == image
        assert record.labels.dtype == np.float32 and record.labels.tolist() == [header.label]


def test_a_missing_index_is_rebuilt_as_mxnet_wrote_it_and_kept(written_by_mxnet, tmp_path):
    path = copy(written_by_mxnet, tmp_path)
    rebuilt = open_reader(path)
    idx = tmp_path / "train.idx"
    assert idx.read_bytes() == written_by_mxnet.with_suffix(".idx").read_bytes()
    assert rebuilt.digest() == open_reader(path).digest() == open_reader(written_by_mxnet).digest()


def test_several_files_follow_each_other(mxnet_files):
    paths = [mxnet_files / "sample.rec", mxnet_files / "sample-256.rec"]
    both, each = open_reader(paths), [open_reader(path) for path in paths]
    assert len(both) == 430
    for number in (0, 214, 215, 429):
        reader, local = each[number // 215], number % 215
        assert both.read(number).image == reader.read(local).image
        assert both.where(number) == reader.where(local)
    assert both.digest() == open_reader(paths).digest() != open_reader(paths[::-1]).digest()


def test_a_missing_file_and_an_unknown_format(tmp_path):
    with pytest.raises(UserError, match="train.rec: no such file"):
        open_reader(tmp_path / "train.rec")
    (tmp_path / "train.txt").write_text("cat")
    with pytest.raises(UserError, match=r"train.txt: unknown format; expected one of: RecordIO: .rec"):
        open_reader(tmp_path / "train.txt")
