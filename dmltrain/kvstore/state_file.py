"""Files of optimizer states. They are written completely or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dmltrain.base import bounded, npz, whole_file
from dmltrain.base.arrays import Array
from dmltrain.base.errors import UserError


def read_state(path: str) -> bytes:
    """Raises UserError when the file cannot be read."""
    try:
        return bounded.read(Path(path))
    except OSError as error:
        raise UserError(
            f"{path}: {error.strerror}; the optimizer's state was expected there, one file for each server "
            "of the job that saved it"
        ) from error


def read_arrays(path: str) -> Mapping[str, Array]:
    """The arrays in the file of a store without servers. Raises UserError when it cannot be read."""
    try:
        return npz.read(read_state(path))
    except ValueError as error:
        raise UserError(f"{path} is not an optimizer's state: {error}; load a file that this kvstore saved") from error


def write_whole(path: Path, data: bytes | bytearray | memoryview) -> None:
    """Raises UserError; a file at `path` is then unchanged."""
    try:
        whole_file.write(path, data)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; the optimizer's state was not saved") from error
