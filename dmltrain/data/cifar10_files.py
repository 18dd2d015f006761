"""The files of CIFAR-10 in their four forms. The md5 of an archive is checked before it is opened, and that of each
batch before it is parsed.

binary  data_batch_1.bin .. test_batch.bin (maybe in cifar-10-batches-bin/), or cifar-10-binary.tar.gz.
        A row is a label byte and 3,072 pixel bytes (planes R, G, B of 32x32).
python  data_batch_1 .. test_batch (maybe in cifar-10-batches-py/), or cifar-10-python.tar.gz.
        A pickle of a dict: b'data' uint8 (10000, 3072), b'labels' list of int. array_pickle reads it.

Archives are read in memory, in one pass. Nothing is unpacked to disk, and only regular files with the known names are
read.
"""

import tarfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np

from dmltrain.base.arrays import Array
from dmltrain.base.errors import UserError
from dmltrain.data import array_pickle, source
from dmltrain.data.download import Remote, fetch

BASE_URL = "https://www.cs.toronto.edu/~kriz/"
PIXELS = 3 * 32 * 32
Arrays = tuple[Array, Array]  # images uint8 (rows, 3, 32, 32), labels int64 (rows,)


@dataclass(frozen=True)
class BatchFile:
    """One batch; `name` is without .bin. The md5 of its binary and of its python form."""

    name: str
    md5_binary: str
    md5_python: str


@dataclass(frozen=True)
class Cifar10Files:
    """All batches, of `rows` images each, and the md5 of the archives."""

    train: tuple[BatchFile, ...]
    test: BatchFile
    rows: int
    md5_binary: str
    md5_python: str


CIFAR10 = Cifar10Files(
    (
        BatchFile("data_batch_1", "5dd7e06a14cb22eb9f671a540d1b7c25", "c99cafc152244af753f735de768cd75f"),
        BatchFile("data_batch_2", "5ea93a67294ea407fff1d09f752e9692", "d4bba439e000b95fd0a9bffe97cbabec"),
        BatchFile("data_batch_3", "942cd6a4bcdd0dd3c604fbe906cb4421", "54ebc095f3ab1f0389bbae665268c751"),
        BatchFile("data_batch_4", "ae636b3ba5c66a11e91e8cb52e771fcb", "634d18415352ddfa80567beed471001a"),
        BatchFile("data_batch_5", "53f37980c15c3d472c316c40844f3f0d", "482c414d41f54cd18b22e5b47cb7c3cb"),
    ),
    BatchFile("test_batch", "803d5f7f4d78ea53de84dbe85f74fb6d", "40351d587109b95175f43aff81a1287e"),
    10000,
    "c32a1d4ab5d03f1284b67883e8d87530",
    "c58f30108f718f92721af3b95e74349a",
)


@dataclass(frozen=True)
class Form:
    """One of the two forms: the names of its files, folder and archive, and its parser."""

    suffix: str
    folder: str
    archive: str
    parse: Callable[[str, bytes, int], Arrays]  # file name, contents, rows

    def batch_md5(self, batch: BatchFile) -> str:
        return batch.md5_binary if self.suffix else batch.md5_python

    def archive_md5(self, files: Cifar10Files) -> str:
        return files.md5_binary if self.suffix else files.md5_python

    @property
    def fixed(self) -> bool:
        """Whether all batches have the same size."""
        return bool(self.suffix)

    def size(self, files: Cifar10Files) -> int:
        """Bytes of a batch if they are fixed, else their limit: the python batches are 1 % larger than the binary."""
        return files.rows * (1 + PIXELS) * (1 if self.fixed else 2)


def read(
    folder: Path, needed: tuple[BatchFile, ...], files: Cifar10Files, download: bool, base_url: str
) -> Iterator[tuple[BatchFile, Arrays]]:
    """Each needed batch once, in any order, from the first form found in `folder`, else from a download.

    UserError: a batch is missing, damaged or not the original.
    """
    for form in FORMS:
        for place in (folder, folder / form.folder):
            if all((place / (batch.name + form.suffix)).is_file() for batch in needed):
                return _from_files(place, needed, files, form)
    for form in FORMS:
        if (archive := folder / form.archive).exists():
            return _from_archive(archive, needed, files, form)
    _refuse_incomplete(folder, needed)
    if not download:
        raise UserError(
            f"CIFAR-10 is not in {folder}; put {BINARY.archive} or {PYTHON.archive} (from {base_url}), or the batches "
            "in one of them, into it, or allow the download"
        )
    remote = Remote(base_url + BINARY.archive, files.md5_binary)
    return _from_archive(fetch(remote, folder), needed, files, BINARY)


def _refuse_incomplete(folder: Path, needed: tuple[BatchFile, ...]) -> None:
    """Raise UserError if only some of the needed batches exist, instead of downloading all again."""
    for form in FORMS:
        for place in (folder, folder / form.folder):
            paths = [place / (batch.name + form.suffix) for batch in needed]
            missing = [path.name for path in paths if not path.is_file()]
            if len(missing) < len(paths):
                raise UserError(
                    f"{place}: {', '.join(missing)} missing, while other batches of CIFAR-10 are there; "
                    f"put the missing batches there, too, or {form.archive} into {folder}"
                )


def _from_files(
    place: Path, needed: tuple[BatchFile, ...], files: Cifar10Files, form: Form
) -> Iterator[tuple[BatchFile, Arrays]]:
    for batch in needed:
        path = place / (batch.name + form.suffix)
        data = source.read(path, form.size(files), form.batch_md5(batch), form.fixed)
        yield batch, form.parse(str(path), data, files.rows)


def _from_archive(
    archive: Path, needed: tuple[BatchFile, ...], files: Cifar10Files, form: Form
) -> Iterator[tuple[BatchFile, Arrays]]:
    wanted = {batch.name + form.suffix: batch for batch in needed}
    for name, data in _members(archive, set(wanted), files, form):
        batch = wanted.pop(name)
        source.check(f"{archive}: {name}", data, form.size(files) if form.fixed else None, form.batch_md5(batch))
        yield batch, form.parse(f"{archive}: {name}", data, files.rows)
        if not wanted:
            return
    raise UserError(f"{archive}: {', '.join(wanted)} missing")


def _members(archive: Path, names: set[str], files: Cifar10Files, form: Form) -> Iterator[tuple[str, bytes]]:
    """The regular files of these names in the archive's folder or at its top level, each only once."""
    own = f"unpack it in {archive.parent}: each batch is checked as well"
    with source.archive(archive, form.archive_md5(files), own) as file:
        try:
            with tarfile.open(fileobj=file, mode="r|gz") as tar:
                for member in tar:
                    path = PurePosixPath(member.name)
                    placed = str(path.parent) in (".", form.folder)
                    if not (placed and path.name in names and member.isreg() and member.size <= form.size(files)):
                        continue
                    names = names - {path.name}
                    yield path.name, tar.extractfile(member).read()  # type: ignore[union-attr]  # a regular file
        except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
            raise UserError(f"{archive}: cannot be read: {error}; delete it and download it again") from None


def _parse_binary(name: str, data: bytes, rows: int) -> Arrays:
    table = np.frombuffer(data, np.uint8).reshape(rows, 1 + PIXELS)
    return table[:, 1:].reshape(rows, 3, 32, 32), table[:, 0].astype(np.int64)


def _parse_python(name: str, data: bytes, rows: int) -> Arrays:
    try:
        content = array_pickle.loads(data)
        images = np.asarray(content[b"data"], np.uint8).reshape(rows, 3, 32, 32)
        labels = np.asarray(content[b"labels"], np.int64).reshape(rows)
    except Exception as error:  # a forged pickle can cause any
        raise UserError(f"{name}: not a python batch of CIFAR-10: {error}") from None
    return images, labels


BINARY = Form(".bin", "cifar-10-batches-bin", "cifar-10-binary.tar.gz", _parse_binary)
PYTHON = Form("", "cifar-10-batches-py", "cifar-10-python.tar.gz", _parse_python)
FORMS = (BINARY, PYTHON)
