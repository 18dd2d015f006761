"""Mutated data files: each is read or refused, in limited memory and time (tests/fuzzing.py).

The files of the data sets are known by their md5, which no mutation has. Here each mutation is the file that is asked
for, so that all that stands behind the md5 is reached.
"""

import dataclasses
import gzip
import hashlib
import io
import zlib

import numpy as np
import pytest

from dmltrain.data import cifar10, cifar10_files, mnist, source
from dmltrain.data.cifar10_files import BatchFile, Files
from dmltrain.data.mnist import IdxFile
from dmltrain.errors import UserError
from tests.data.conftest import python2_pickle, tar_gz
from tests.fuzzing import Fuzzed, folder, parts, survive

FOLDER = folder()
ROWS = 2
PIXELS = np.random.default_rng(5).integers(0, 256, (ROWS, 3072), dtype=np.uint8)
BATCHES = {".bin": np.hstack([np.array([[3], [4]], np.uint8), PIXELS]).tobytes(), "": python2_pickle(PIXELS, [3, 4])}
EACH = BatchFile("data_batch_1", *(hashlib.md5(batch).hexdigest() for batch in BATCHES.values()))
CIFAR10 = Files((EACH,), dataclasses.replace(EACH, name="test_batch"), ROWS, "", "")


def archives() -> list[bytes]:
    made = []
    for form in cifar10_files.FORMS:
        names = [f"{form.folder}/{name}{form.suffix}" for name in ("data_batch_1", "test_batch")]
        packed = tar_gz({"readme.html": b"<html>"} | dict.fromkeys(names, BATCHES[form.suffix]))
        made += [packed, gzip.decompress(packed)]
    return made


def packed(data: bytes) -> bytes:
    """A tar archive is compressed, which makes its checksum right; what is compressed already stays."""
    return data if data.startswith(b"\x1f\x8b") else gzip.compress(data, 0)


def read_archive(data: bytes) -> None:
    """As the binary archive, and if its batches are missing as the python archive."""
    data = packed(data)
    digest = hashlib.md5(data).hexdigest()
    files = dataclasses.replace(CIFAR10, md5_binary=digest, md5_python=digest)
    for form in cifar10_files.FORMS:
        path = FOLDER / form.archive
        path.write_bytes(data)
        try:
            cifar10.load(FOLDER, files=files, download=False, image_shape=(3, 32, 32))
        except UserError as error:
            if form is cifar10_files.FORMS[-1] or "missing" not in str(error):
                raise
        else:
            return
        finally:
            path.unlink()


HEADERS = (b"ustar\0", b"ustar  \0", b"x", b"g", b"L", b"K", b"S", b"77777777777\0", b"20 path=a\n")
ARCHIVES = Fuzzed(read_archive, archives, (UserError,), (*HEADERS, b"\x80\0\0\0\0\0\0\0\0\0\0\1"))
BATCH = Fuzzed(
    lambda data: cifar10_files.PYTHON.parse("data_batch_1", data, ROWS),
    lambda: [BATCHES[""]],
    (UserError,),
    (
        *(b"(", b"t", b"R", b"b", b"]", b"}", b"a", b"s", b"2", b"0", b"q\x00", b"h\x00"),
        *(b"r\xff\xff\xff\x7f", b"\x80\x04"),
        *(b"cnumpy\nndarray\n", b"cnumpy\ndtype\n", b"c_codecs\nencode\n"),
        *(b"\x8e\xff\xff\xff\xff\xff\xff\xff\x7f", b"\x96\xff\xff\xff\xff\xff\xff\xff\x7f"),
    ),
)
IMAGES = np.array([0x0803, ROWS, 28, 28], ">u4").tobytes() + bytes(ROWS * 28 * 28)


def read_idx(data: bytes) -> None:
    data = packed(data)
    digest = hashlib.md5(data).hexdigest()
    try:
        content = hashlib.md5(gzip.GzipFile(fileobj=io.BytesIO(data)).read(1 << 20)).hexdigest()
    except (OSError, EOFError, zlib.error):
        content = "none"
    file = IdxFile("train", (ROWS, 28, 28), content, digest)
    path = FOLDER / "train.gz"
    path.write_bytes(data)
    mnist.parse(file, source.read_gzip(path, file.size, content, digest))


IDX = Fuzzed(read_idx, lambda: [IMAGES, gzip.compress(IMAGES)], (UserError,), (b"\x1f\x8b\x08\x1f", b"\0\0\x08\x01"))


@pytest.mark.parametrize("part", parts())
@pytest.mark.parametrize("name", ["ARCHIVES", "BATCH", "IDX"])
def test_no_data_file_can_break_a_program(name: str, part: int) -> None:
    survive(f"tests.data.test_fuzz:{name}", part)
