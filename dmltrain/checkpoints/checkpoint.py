"""Checkpoint files: PREFIX-0001.pt is the state after epoch 1 (.npz with --backend mxnet), PREFIX-0001_iter_700.pt that
after iteration 700, in the middle of the next epoch.

A file is a zip archive in its framework's format, which the backend encodes and decodes. This module handles names and
bytes: it writes files atomically, verifies them when it reads them, and checks that they fit the run. It imports no
framework.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dmltrain.backends.table import BACKENDS
from dmltrain.base import bounded, whole_file
from dmltrain.base.errors import UserError
from dmltrain.checkpoints import seal
from dmltrain.checkpoints.seal import Examined
from dmltrain.mxnet_files import weights

FORMAT = 1  # of a checkpoint's content: `check` refuses another one
OWNERS = {backend.capabilities.suffix: name for name, backend in BACKENDS.items()}
SUFFIXES = (*OWNERS, weights.SUFFIX)  # every backend can start from MXNet's weights


class Saved(NamedTuple):
    """What a checkpoint's name says. Newer ones are larger, because an iteration belongs to the epoch after `epoch`."""

    epoch: int  # whole epochs
    iteration: int = 0  # of the whole run; 0 at the end of an epoch


def path(prefix: str, epoch: int, suffix: str = ".pt", iteration: int = 0) -> Path:
    """The file of the state after `epoch` epochs, or with `iteration` in the epoch after them. Numbers start from 1, as
    in MXNet."""
    return Path(f"{prefix}-{epoch:04d}{f'_iter_{iteration}' if iteration else ''}{suffix}")


def last(
    prefix: str, suffixes: Sequence[str] = (".pt",), load_other: Callable[[Path], object] = Path.exists
) -> tuple[Saved, tuple[str, ...]]:
    """The newest undamaged checkpoint (Saved(0) if there is none), and for each newer one what is damaged in it.

    `suffixes`: first the backend's own, then those of other programs' files, which `load_other` reads. Another
    program's file counts only for an epoch without the backend's own file. Raises UserError if a file cannot be opened,
    or if there are only checkpoints of another backend: a training from the start would silently ignore these.
    """
    names = _names(Path(prefix))
    damaged: list[str] = []
    for saved in sorted({saved for saved, suffix in names if suffix in suffixes}, reverse=True):
        source = next(
            path(prefix, saved.epoch, suffix, saved.iteration) for suffix in suffixes if (saved, suffix) in names
        )
        damage = _damage(source, None if source.suffix == suffixes[0] else load_other)
        if not damage:
            return saved, tuple(damaged)
        damaged.append(damage)
    if names and not damaged:
        raise UserError(f"--load-epoch last: {_present(Path(prefix), suffixes)}")
    return Saved(0), tuple(damaged)


def of_iteration(prefix: str, iteration: int) -> Saved:
    """The newest checkpoint with this iteration in its name. Raises UserError if there is none."""
    saved_then = [saved for saved, _ in _names(Path(prefix)) if saved.iteration == iteration]
    if not saved_then:
        raise UserError(
            f"no checkpoint {prefix}-EPOCH_iter_{iteration}; {_present(Path(prefix), SUFFIXES)} (that of the last "
            "iteration of an epoch is the epoch's)"
        )
    return max(saved_then)


def _damage(source: Path, load: Callable[[Path], object] | None) -> str:
    """What is damaged in the file; "" if it is whole. `load` raises UserError for a file that it cannot read."""
    damage = examine(source).damage
    if damage:
        return f"{source}: {damage}"
    try:
        if load:
            load(source)
    except UserError as error:
        return str(error)
    return ""


def _names(prefix: Path) -> dict[tuple[Saved, str], str]:
    """(what is saved, suffix) -> file name, for all checkpoints with this prefix, by epoch."""
    suffixes = "|".join(map(re.escape, SUFFIXES))
    pattern = re.compile(rf"{re.escape(prefix.name)}-(\d{{4,}})(?:_iter_(\d+))?({suffixes})")
    try:
        matches = [pattern.fullmatch(name) for name in sorted(os.listdir(prefix.parent))]
    except OSError:
        return {}
    return {(Saved(int(match[1]), int(match[2] or 0)), match[3]): match[0] for match in matches if match}


def prepare(prefix: str) -> None:
    """Before training: check that checkpoints can be written, and remove unfinished files of writers that were killed.
    Raises UserError."""
    target = path(prefix, 0)
    start = re.escape(target.name.removesuffix("0000.pt"))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        whole_file.remove_left(target.parent, rf"{start}(\d{{4,}}(_iter_\d+)?\.\w+|symbol\.json)")
        with whole_file.temporary(target):
            pass
    except OSError as error:
        raise UserError(
            f"--model-prefix {prefix}: cannot write there: {error.strerror}; choose another prefix"
        ) from error


def write(target: Path, content: bytes, confirm: Callable[[], None] = lambda: None) -> None:
    """Replace `target` by `content`, whole or not at all; see whole_file.write. Raises UserError if it cannot be
    written."""
    try:
        whole_file.write(target, content, confirm=confirm)
    except OSError as error:
        raise UserError(
            f"cannot write the checkpoint {target} ({len(content)} bytes): {_reason(error)}; "
            "earlier checkpoints are intact, resume from the newest with --load-epoch last"
        ) from error


def _reason(error: OSError) -> str:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return f"{error.strerror}{', free some space there' if full else ''}"


def examine(source: Path) -> Examined:
    """The content of a checkpoint file, its sha256, and whether it is whole. Raises UserError if it cannot be read."""
    try:
        return seal.examine(bounded.read(source), source.suffix)
    except FileNotFoundError:
        raise UserError(f"no checkpoint {source}; {_present(_prefix(source), [source.suffix], source.name)}") from None
    except OSError as error:
        if error.errno == errno.EIO:
            return Examined(b"", "", "the disk cannot read it (Input/output error)")
        raise UserError(f"cannot read the checkpoint {source}: {error.strerror}") from error


def read(source: Path) -> bytes:
    """The content of a checkpoint file that is whole. Raises UserError if it is missing or damaged."""
    examined = examine(source)
    if examined.damage:
        raise UserError(
            f"the checkpoint {source} is damaged or truncated: {examined.damage}; "
            f"{_present(_prefix(source), [source.suffix], source.name)}; --load-epoch last skips damaged ones"
        )
    return examined.content


def _prefix(source: Path) -> Path:
    return source.with_name(re.sub(r"-\d{4,}(_iter_\d+)?\.\w+$", "", source.name))


def _present(prefix: Path, suffixes: Collection[str], without: str = "") -> str:
    """'present in out: m-0001.pt, m-0002.pt': all checkpoints with this prefix, those of other backends last."""
    names = _names(prefix)
    usable = {*suffixes, weights.SUFFIX}
    own = [name for (_, suffix), name in names.items() if suffix in usable and name != without]
    text = f"present in {prefix.parent}: {', '.join(own) or 'no checkpoint of this prefix and backend'}"
    for suffix in sorted(OWNERS.keys() - usable, key=OWNERS.__getitem__):
        others = [name for (_, suffix_of), name in names.items() if suffix_of == suffix]
        text += f"; of --backend {OWNERS[suffix]}: {', '.join(others)}" if others else ""
    return text


def check(source: Path, content: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raise UserError unless the checkpoint has the run's network and optimizer (`expected`)."""
    if content.get("format") != FORMAT:
        raise UserError(
            f"{source} is not a checkpoint of this version of dmltrain: expected format {FORMAT}, "
            f"found {content.get('format')!r}"
        )
    wrong = [
        f"{name.replace('_', ' ')} {content.get(name)!r}, expected {value!r}"
        for name, value in expected.items()
        if content.get(name) != value
    ]
    if wrong:
        raise UserError(f"the checkpoint {source} belongs to another run: {'; '.join(wrong)}")
