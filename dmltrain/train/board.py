"""--tensorboard: what a worker writes for TensorBoard besides its log.

    DIR/worker-0            over iterations: batch/..., train/..., validation/..., run/..., usage/..., communication/...
    DIR/worker-0/epochs     the values of whole epochs over epochs, which count from 1: epoch-train/..., epoch-run/...

Each worker has its own folder, because speed, usage and waits differ between workers, and without synchronous steps the
metrics as well. A run that resumes continues the curves: TensorBoard drops the values after the checkpoint.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from logging import Logger
from pathlib import Path

from dmltrain.base.errors import UserError
from dmltrain.logs.event_file import EventFile, library
from dmltrain.options import Options, flag
from dmltrain.train.plan import Plan, Position

SPLITS = ("train", "validation")
SECONDS = "Time cost"


class Board:
    """Writes nothing: the board of a run without --tensorboard."""

    def batch(self, iteration: int, speed: float, metrics: Mapping[str, float]) -> None:
        """The values of a batch line of the log."""

    def test(self, iteration: int, values: Mapping[str, float]) -> None:
        """Values in the middle of an epoch, by their names in the log."""

    def epoch(self, epoch: int, values: Mapping[str, float]) -> None:
        """Values of an epoch, by their names in the log."""

    def spent(self, epoch: int, group: str, values: Mapping[str, float]) -> None:
        """Values of an epoch that the log has in one line."""


class EventBoard(Board):
    """Writes event files. When that fails, it warns once, and the run goes on."""

    def __init__(self, folder: Path, plan: Plan, start: Position, log: Logger):
        self._plan, self._log = plan, log
        try:
            self._steps: EventFile | None = EventFile(folder, plan.iteration(start))
            self._epochs = EventFile(folder / "epochs", start.epoch)
        except OSError as error:
            raise unwritable(folder, error) from None

    def describe(self, command: str, options: Options) -> None:
        """The command and all options, as text."""
        rows = [f"| {flag(name)} | {_cell(value)} |" for name, value in sorted(vars(options).items())]
        texts = {"command": f"    {command}", "options": "\n".join(["| option | value |", "| --- | --- |", *rows])}
        with self._guard():
            for name, text in texts.items():
                if self._steps:
                    self._steps.text(name, text)

    def batch(self, iteration: int, speed: float, metrics: Mapping[str, float]) -> None:
        values = {"speed": speed, **metrics}
        self._write(iteration, {f"batch/{name}": value for name, value in values.items()})

    def test(self, iteration: int, values: Mapping[str, float]) -> None:
        self._write(iteration, {tag(name): value for name, value in values.items()})

    def epoch(self, epoch: int, values: Mapping[str, float]) -> None:
        self._write_epoch(epoch, {tag(name): value for name, value in values.items()})

    def spent(self, epoch: int, group: str, values: Mapping[str, float]) -> None:
        self._write_epoch(epoch, {f"{group}/{name}": value for name, value in values.items()})

    def _write_epoch(self, epoch: int, values: Mapping[str, float]) -> None:
        position = self._plan.after(epoch, self._plan.steps_of(epoch))
        self._write(self._plan.iteration(position), values)
        with self._guard():
            if self._steps:
                self._epochs.scalars(epoch + 1, {f"epoch-{name}": value for name, value in values.items()})

    def _write(self, iteration: int, values: Mapping[str, float]) -> None:
        with self._guard():
            if self._steps:
                self._steps.scalars(iteration, values)

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._log.warning("Nothing more is written for TensorBoard: %s", error.strerror)
            if self._steps:
                self._steps.close()
                self._epochs.close()
            self._steps = None


def check(folder: str) -> None:
    """Before a run's data are read: raises UserError if the package is missing or the folder cannot be made."""
    library()
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(Path(folder), error) from None


def unwritable(folder: Path, error: OSError) -> UserError:
    return UserError(f"--tensorboard: cannot write to {folder}: {error.strerror}; choose another folder")


def tag(name: str) -> str:
    """The tag of a value by its name in the log: Train-accuracy -> train/accuracy, Time cost -> run/seconds."""
    split, _, metric = name.lower().partition("-")
    if split in SPLITS and metric:
        return f"{split}/{metric}"
    return "run/seconds" if name == SECONDS else f"run/{name.lower()}"


def _cell(value: object) -> str:
    text = ",".join(map(str, value)) if isinstance(value, tuple) else "" if value is None else str(value)
    return text.replace("|", "\\|").replace("\n", " ")
