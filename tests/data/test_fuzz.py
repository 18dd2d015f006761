"""Mutated data files: each is read or refused, in limited memory and time (tests/fuzzing.py).

The files of the data sets are known by their md5, which no mutation has. Here each mutation is the file that is asked
for, so that all that stands behind the md5 is reached.
"""

import dataclasses
import gzip
import hashlib
import io
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dmltrain.base.errors import UserError
from dmltrain.data import cifar10, cifar10_files, mnist, source
from dmltrain.data.cifar10_files import BatchFile, Cifar10Files
from dmltrain.data.mnist import IdxFile
from dmltrain.data.readers import datum, mat_file, open_reader, recordio
from dmltrain.data.readers.data_file import Damaged
from dmltrain.data.readers.record_writer import RecordWriter
from tests.archives import tar
from tests.data import matlab
from tests.data.conftest import python2_pickle, tar_gz
from tests.data.test_readers_caffe import BGR, encoded, floats, raw
from tests.data.test_readers_tars import class_tars, devkit_files, meta
from tests.fuzzing import Fuzzed, folder, parts, survive

FOLDER = folder()
ROWS = 2
PIXELS = np.random.default_rng(5).integers(0, 256, (ROWS, 3072), dtype=np.uint8)
BATCHES = {".bin": np.hstack([np.array([[3], [4]], np.uint8), PIXELS]).tobytes(), "": python2_pickle(PIXELS, [3, 4])}
EACH = BatchFile("data_batch_1", *(hashlib.md5(batch).hexdigest() for batch in BATCHES.values()))
CIFAR10 = Cifar10Files((EACH,), dataclasses.replace(EACH, name="test_batch"), ROWS, "", "")


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


# Files of images

NOWHERE = FOLDER / "missing" / "index"  # where no index can be kept: that would wait for the disk


def read_all(path: Path, **arguments: Path) -> None:
    reader = open_reader(path, warn=lambda text: None, **arguments)
    reader.digest()
    for number in range(min(len(reader), 50)):
        reader.where(number)
        reader.read(number)


def reading(name: str, before: Callable[[], object] = lambda: None, **arguments: Path) -> Callable[[bytes], None]:
    """A function that reads its argument as the file of this name."""

    def read(data: bytes) -> None:
        before()
        (FOLDER / name).write_bytes(data)
        read_all(FOLDER / name, **arguments)

    return read


# -- RecordIO ---------------------------------------------------------------------------------------------------------


def records() -> bytes:
    """A file of records, which stays: the index tests need it."""
    path = FOLDER / "whole.rec"
    if not path.exists():
        writer = RecordWriter(path)
        for number in range(5):
            writer.write([1.0, 2.0] if number == 3 else number, number, b"image " * number + recordio.MAGIC * 2)
        writer.finish()
    return path.read_bytes()


def index() -> bytes:
    records()
    return FOLDER.joinpath("whole.idx").read_bytes()


def read_index(data: bytes) -> None:
    (FOLDER / "mutated.idx").write_bytes(data)
    read_all(FOLDER / "whole.rec", index=FOLDER / "mutated.idx")


HEADS = tuple(recordio.HEAD.pack(recordio.MAGIC_NUMBER, flag << 29 | 8) for flag in range(4))
RECORD_WORDS = (recordio.MAGIC, *HEADS, b"\xff\xff\xff\x1f")
RECORDS = Fuzzed(reading("mutated.rec", index=NOWHERE), lambda: [records()], (UserError,), RECORD_WORDS)
INDEX = Fuzzed(read_index, lambda: [index()], (UserError,), (b"\t", b"\n", b"\r\n", b"-", b"0\t0\n", b"9" * 18))


# -- lists ------------------------------------------------------------------------------------------------------------


def image_list() -> bytes:
    for name in ("a.jpg", "ä b.png"):
        (FOLDER / name).write_bytes(b"image")
    return "0\t1\ta.jpg\n1\t2.5\t3\tä b.png\n\n2\t0\ta.jpg\n".encode()


LIST_WORDS = (b"\t", b"\n", b"..", b"/", b"nan", b"1e999", b"\0")
LIST = Fuzzed(reading("mutated.lst"), lambda: [image_list()], (UserError,), LIST_WORDS)


# -- archives of images -----------------------------------------------------------------------------------------------


def image_archives() -> list[bytes]:
    (FOLDER / "ILSVRC2012_devkit_t12.tar.gz").write_bytes(gzip.compress(tar(devkit_files())))
    long = {"x" * 200 + "_3.JPEG": b"image"}
    images = tar({f"ILSVRC2012_val_{number:08d}.JPEG": b"image" for number in (1, 4)})
    return [tar(class_tars()), tar({"n01.tar": tar(long, 1), "n02.tar": tar(long, 2)}), images]


def kept_index() -> bytes:
    path = FOLDER / "whole.tar"
    path.write_bytes(tar(class_tars()))
    read_all(path)
    return FOLDER.joinpath("whole.tar.index").read_bytes()


def read_kept_index(data: bytes) -> None:
    path = FOLDER / ("i" * 250)  # so long a name that none can be written beside it: that would wait for the disk
    path.write_bytes(data)
    read_all(FOLDER / "whole.tar", index=path)


def read_devkit(data: bytes) -> None:
    path = FOLDER / "mutated.tar.gz"
    path.write_bytes(data if data.startswith(b"\x1f\x8b") else gzip.compress(data, 0))
    read_all(FOLDER / "val.tar", index=NOWHERE, devkit=path)


def devkits() -> list[bytes]:
    (FOLDER / "val.tar").write_bytes(image_archives()[2])
    return [form(tar(devkit_files(meta=meta(packed)))) for packed in (True, False) for form in (bytes, gzip.compress)]


WORDS = (
    *(b"ustar\0", b"x", b"L", b"S", b"77777777777\0", b"20 path=a\n", b"14 size=9999\n"),
    b"\x80\0\0\0\0\0\0\0\0\0\0\1",
)
ARCHIVE = Fuzzed(reading("mutated.tar", index=NOWHERE), image_archives, (UserError,), (*WORDS, b".tar\0", b".JPEG\0"))
KEPT = Fuzzed(  # a damaged one is made again
    read_kept_index, lambda: [kept_index()], (), (b'"<i8"', b'"|u1"', b"[", b"]", b"{}", b"1e999", b"null", b"\n")
)
DEVKIT = Fuzzed(read_devkit, devkits, (UserError,), (*WORDS, b"\x1f\x8b\x08"))
SIZES = (b"\x0e\0\0\0", b"\x0f\0\0\0", b"\xff\xff\xff\x7f", b"\0\0\1\0", b"\1\0\4\0")
MATLAB = Fuzzed(
    mat_file.read,
    lambda: [meta(), meta(False), matlab.file(matlab.matrix("c", 1, (1, 2), matlab.value("text"), matlab.value(7)))],
    (Damaged,),
    SIZES,
)


# -- Datums -----------------------------------------------------------------------------------------------------------

DATUM = Fuzzed(
    datum.read,
    lambda: [raw(BGR[0], 1), encoded(b"JPEG" * 20, -1), floats(BGR[0], True), floats(BGR[0][:1], False)],
    (Damaged,),
    (b"\xff" * 9, b"\x22", b"\x35", b"\x38\1", b"\x80\x80\x80\x80\x80\1", b"\x08\3"),
)

FAST = ["ARCHIVES", "BATCH", "IDX", "DATUM", "MATLAB"]
SLOW = ["RECORDS", "INDEX", "LIST", "ARCHIVE", "KEPT", "DEVKIT"]


@pytest.mark.parametrize("part", parts())
@pytest.mark.parametrize("name", [*FAST, *(pytest.param(name, marks=pytest.mark.thorough) for name in SLOW)])
def test_no_data_file_can_break_a_program(name: str, part: int) -> None:
    survive(f"tests.data.test_fuzz:{name}", part)
