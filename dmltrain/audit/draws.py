"""The audit of any training loop: which samples each rank draws, in the lines of samples-RANK.jsonl (lines.py).

In these lines `op` is the number of the batch in its epoch, from 1 on; batches that are skipped count, too. `view` is
the number of the start: a script that goes on from a checkpoint continues the files. `positions` are the samples, by
their number in the dataset; a line without any says that the rank has come to the epoch's end. draws.json has the facts
that do not change:

    {"format": 1, "samples": 1797, "workers": 2, "drop_last": false,
     "starts": [[4, 32], [2, 64]]}

`starts` has the workers and the batch of each start of rank 0, as far as they are known; batch 0 is not. Another rank
counts the starts in which it took part.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np

from dmltrain.audit import lines
from dmltrain.audit.lines import Count, FromOne, Writer
from dmltrain.base import env, json_text, schema, whole_file
from dmltrain.base.errors import UserError

NAME, DEFAULT = "draws.json", "audit"
NESTED = ("batch_sampler", "sampler", "_sampler")  # what a sampler has that draws before it
if TYPE_CHECKING:
    Format = int
else:
    Format = schema.whole(1, 1)


@dataclass(frozen=True)
class Facts:
    """samples: of the dataset. drop_last: whether the sampler leaves out samples at an epoch's end. workers: of the
    newest start. starts: workers and batch of each one."""

    MAY_OMIT = True

    format: Format
    samples: FromOne
    workers: FromOne
    drop_last: bool
    starts: tuple[tuple[FromOne, Count], ...] = ()


def audited(sampler: Any, folder: str | Path | None = None, samples: int | None = None) -> Any:
    """See dmltrain.audited."""
    place = Path(folder or env.audit() or DEFAULT)
    loader = getattr(sampler, "base_dataloader", sampler)  # Accelerate's has a real one
    if not (hasattr(loader, "dataset") and hasattr(loader, "collate_fn")):
        return Draws(sampler, place, samples)
    if loader.batch_sampler is None:
        raise UserError("dmltrain.audited: this loader makes no batches (batch_size=None): pass its sampler")
    # A DataLoader refuses another one, because it could contradict its own batch_size; this one cannot.
    object.__setattr__(loader, "batch_sampler", Draws(loader.batch_sampler, place, samples or len(loader.dataset)))
    return sampler


class Draws:
    """Draws what `sampler` does, batches or single samples, and writes it down before it hands it on. What it does not
    have itself, such as `batch_size`, is the sampler's."""

    def __init__(self, sampler: Any, folder: Path, samples: int | None) -> None:
        rank, workers = _place()
        self._sampler = sampler
        self._epoch = -1  # the newest one
        self._told = 0
        self._writer = Writer(folder, rank, continues=True)
        self._start = 1 + max((line.view for line in lines.samples(folder, rank, sys.maxsize)), default=0)
        if rank == 0:
            starts = *_starts(folder, self._start - 1), (workers, max(_all(sampler, "batch_size"), default=0))
            facts = Facts(1, samples or _samples(sampler), workers, any(_all(sampler, "drop_last")), starts)
            whole_file.write(folder / NAME, json_text.encode(facts) + b"\n")

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # as copy does, before there is a sampler
            raise AttributeError(name)
        return getattr(self._sampler, name)

    def set_epoch(self, epoch: int) -> None:
        self._told = epoch
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        skipped = _skipped(sys._getframe(1), self)
        # A sampler whose set_epoch is never called has the same `epoch` in all of them.
        self._epoch = epoch = max(self._epoch + 1, self._told, *_all(self._sampler, "epoch"))
        number, last = 0, len(self._sampler) if hasattr(self._sampler, "__len__") else 0
        for number, drawn in enumerate(self._sampler, 1):
            if number > skipped:
                self._write(number, epoch, drawn)
            if number == last:
                self._write(number + 1, epoch, [])  # now: Lightning does not ask for more
            yield drawn
        if number != last:
            self._write(number + 1, epoch, [])

    def _write(self, number: int, epoch: int, drawn: Any) -> None:
        self._writer.began(number, self._start, epoch, np.array(drawn, np.int64).reshape(-1))


def _starts(folder: Path, count: int) -> tuple[tuple[int, int], ...]:
    """So many earlier starts of this folder. Raises UserError for a damaged file."""
    before = read(folder) if count else None
    return (*before.starts, *[(before.workers, 0)] * count)[:count] if before else ()


def _place() -> tuple[int, int]:
    """This worker's rank, and the number of workers: the launcher's, or torchrun's."""
    environment = env.read()
    if environment.launched:
        return environment.index, environment.num_workers
    return env.torch_place()


def _skipped(caller: FrameType, drawn: Draws) -> int:
    """How many batches the one who draws throws away: Accelerate's skip_first_batches, of which nothing else says so
    to the sampler inside it."""
    owner = caller.f_locals.get("self")
    return int(getattr(owner, "skip_batches", 0)) if getattr(owner, "batch_sampler", None) is drawn else 0


def _all(sampler: Any, name: str) -> list[int]:
    """The whole numbers that the sampler, and those inside it, have under this name."""
    own = getattr(sampler, "__dict__", {})
    inside = [number for nested in NESTED if nested in own for number in _all(own[nested], name)]
    return [*([int(own[name])] if isinstance(own.get(name), int) else []), *inside]


def _samples(sampler: Any) -> int:
    """Of the dataset of the sampler, or of one inside it. Raises UserError if none has one."""
    own = getattr(sampler, "__dict__", {})
    for name in ("dataset", "data_source"):
        if name in own:
            return len(own[name])
    for nested in NESTED:
        if nested in own:
            return _samples(own[nested])
    raise UserError(
        f"dmltrain.audited: {type(sampler).__name__} has no dataset whose samples could be counted: pass their number, "
        "as in dmltrain.audited(sampler, samples=50000)"
    )


def read(folder: Path) -> Facts:
    """Raises UserError for a file that is missing or damaged."""
    try:
        return parse((folder / NAME).read_bytes())
    except OSError as error:
        raise UserError(f"{folder / NAME}: {error.strerror}; the folder of an audit was expected") from error
    except ValueError as error:
        raise UserError(f"{folder / NAME}: {error}: the file is damaged") from None


def parse(content: bytes) -> Facts:
    """Raises ValueError."""
    return schema.read(Facts, json_text.parse(content))
