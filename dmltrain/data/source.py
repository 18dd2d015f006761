"""Reads data files and checks their size and md5. Errors name the file and the fix.

The checksums are md5, because the authors of the data published these. Nobody knows how to make a second file with the
md5 of a given one. An archive of another origin can unpack to any number of bytes, so archives are checked before they
are opened. Still, the parsers do not trust the data.
"""

import contextlib
import gzip
import hashlib
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from dmltrain.base.errors import UserError

CHUNK = 1 << 20  # bytes


def md5(data: bytes | bytearray | memoryview) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


def read(path: Path, size: int, checksum: str, exact: bool = True) -> bytes:
    """The whole file: `size` bytes (or at most `size`, unless `exact`) with md5 `checksum`."""
    try:
        with path.open("rb") as file:
            actual = path.stat().st_size
            if actual > size or (exact and actual != size):
                raise wrong_size(str(path), size, actual, exact)
            data = file.read(size + 1)  # a device may have more than its size says
    except OSError as error:
        raise unreadable(path, error) from None
    check(str(path), data, size if exact or len(data) > size else None, checksum)
    return data


@contextlib.contextmanager
def archive(path: Path, checksum: str, own: str) -> Iterator[BinaryIO]:
    """The open file, after its md5 was compared with `checksum`. `own`: for the message, what users do with an archive
    that they packed themselves."""
    try:
        with path.open("rb") as file:
            digest = hashlib.md5(usedforsecurity=False)
            while chunk := file.read(CHUNK):
                digest.update(chunk)
            if digest.hexdigest() != checksum:
                raise UserError(
                    f"{path}: md5 {digest.hexdigest()}, expected {checksum}: the archive is damaged or not the "
                    f"original; delete it and download it again, or, if you packed it yourself, {own}"
                )
            file.seek(0)
            yield file
    except OSError as error:
        raise unreadable(path, error) from None


def read_gzip(path: Path, size: int, checksum: str, packed_checksum: str) -> bytes:
    """The content of a .gz file with md5 `packed_checksum`: `size` bytes with md5 `checksum`. Reads at most size + 1
    bytes."""
    with archive(path, packed_checksum, f"unpack it with gunzip {path}: its content is checked as well") as file:
        try:
            data = gzip.GzipFile(fileobj=file).read(size + 1)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise UserError(f"{path}: damaged gzip file ({error}); delete it and download it again") from None
    check(f"{path} (unpacked)", data, size, checksum)
    return data


def check(name: str, data: bytes, size: int | None, checksum: str) -> None:
    """Raise UserError unless the data are `size` bytes with md5 `checksum`."""
    if size is not None and len(data) != size:
        raise wrong_size(name, size, len(data))
    actual = md5(data)
    if actual != checksum:
        raise UserError(
            f"{name}: md5 {actual}, expected {checksum}: the file is damaged or not the original; "
            "delete it and download it again"
        )


def wrong_size(name: str, expected: int, actual: int, exact: bool = True) -> UserError:
    state = "truncated" if actual < expected else "not the original"
    limit = f"{'' if exact else 'at most '}{expected}"
    return UserError(f"{name}: {actual} bytes, expected {limit}: the file is {state}; delete it and download it again")


def unreadable(path: Path, error: OSError) -> UserError:
    return UserError(f"{path}: cannot be read: {error.strerror or error}")


def folder(data_dir: str | Path | None, name: str) -> Path:
    """The folder of the data set's files: data_dir/<name> if it exists, else data_dir; default: data/<name>."""
    if data_dir is None:
        return Path("data") / name
    path = Path(data_dir)
    if path.exists() and not path.is_dir():
        raise UserError(f"--data-dir {path}: not a folder")
    return path / name if (path / name).is_dir() else path
