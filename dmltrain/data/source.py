"""Reads data files and checks their size and md5. Errors name the file and the fix.

The checksums are md5, because that is what the authors of the data published. They detect damage, not attacks; the
parsers do not trust the data.
"""

import gzip
import hashlib
import zlib
from pathlib import Path

from dmltrain.errors import UserError


def md5(data: bytes | bytearray | memoryview) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


def read(path: Path, size: int | None, checksum: str) -> bytes:
    """The whole file, `size` bytes (None: not fixed) with md5 `checksum`."""
    try:
        found = path.stat().st_size
        if size is not None and found != size:
            raise wrong_size(str(path), size, found)
        data = path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from None
    check(str(path), data, size, checksum)
    return data


def read_gzip(path: Path, size: int, checksum: str) -> bytes:
    """The content of a .gz file: `size` bytes with md5 `checksum`. Reads at most size + 1 bytes."""
    try:
        with gzip.open(path) as stream:
            data = stream.read(size + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path}: damaged gzip file ({error}); delete it and download it again") from None
    except OSError as error:
        raise unreadable(path, error) from None
    if len(data) > size:
        raise UserError(
            f"{path}: unpacks to more than the expected {size} bytes: the file is not the original; "
            "delete it and download it again"
        )
    check(f"{path} (unpacked)", data, size, checksum)
    return data


def check(name: str, data: bytes, size: int | None, checksum: str) -> None:
    """Raise UserError unless the data are `size` bytes with md5 `checksum`."""
    if size is not None and len(data) != size:
        raise wrong_size(name, size, len(data))
    found = md5(data)
    if found != checksum:
        raise UserError(
            f"{name}: md5 {found}, expected {checksum}: the file is damaged or not the original; "
            "delete it and download it again"
        )


def wrong_size(name: str, expected: int, found: int) -> UserError:
    what = "truncated" if found < expected else "not the original"
    return UserError(f"{name}: {found} bytes, expected {expected}: the file is {what}; delete it and download it again")


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
