"""Files of optimizer states. They are written completely or not at all."""

from __future__ import annotations

from pathlib import Path

from dmltrain import whole_file
from dmltrain.errors import UserError


def read_state(path: str) -> bytes:
    """Raises UserError when the file cannot be read."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UserError(
            f"{path}: {error.strerror}; the optimizer's state was expected there, one file for each server "
            "of the job that saved it"
        ) from error


def write_whole(path: Path, data: bytes | bytearray | memoryview) -> None:
    """Raises UserError; a file at `path` is then unchanged."""
    try:
        whole_file.write(path, data)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; the optimizer's state was not saved") from error
