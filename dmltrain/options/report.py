"""The options of the group Reports."""

from __future__ import annotations

from dataclasses import dataclass

from dmltrain.backends.table import BACKENDS
from dmltrain.logs.metric import BCE, LOSSES
from dmltrain.options.field import Group, option
from dmltrain.options.values import epoch_or_last, integer, number, one_of, path, several_of

OWN, PARAMS = "own", "params"  # values of --save-format
SUFFIXES = " or ".join(f"{backend.capabilities.suffix} with {name}" for name, backend in BACKENDS.items())


@dataclass(frozen=True)
class ReportOptions(Group):
    """See `Options`."""

    disp_batches: int = option("Reports", "log progress every this many batches", integer(1), 20)
    top_k: int = option("Reports", "also report the top-k accuracy for this k; 0: off", integer(0), 0)
    loss: tuple[str, ...] = option(
        "Reports",
        f"also report these losses: {', '.join(LOSSES)}; {BCE}: train with the binary cross-entropy, the mean over all "
        "classes, and report the usual losses",
        several_of("loss", (*LOSSES, BCE)),
        (),
        metavar="NAME,NAME",
    )
    monitor: int = option(
        "Reports",
        "log the size of each weight every this many iterations, as MXNet's Monitor does; 0: off",
        integer(0),
        0,
    )
    test_interval: int = option(
        "Reports",
        "validate every this many iterations, besides the end of each epoch; 0: off",
        integer(0),
        0,
        metavar="ITERATIONS",
    )
    tensorboard: str | None = option(
        "Reports", "also write event files for TensorBoard, in DIR/worker-0 and so on", path, metavar="DIR"
    )
    model_prefix: str | None = option(
        "Reports", f"write a checkpoint after each epoch, PREFIX-0001 and so on: {SUFFIXES}", path, metavar="PREFIX"
    )
    save_format: str = option(
        "Reports",
        f"{PARAMS}: with each checkpoint also write MXNet's files, PREFIX-symbol.json and PREFIX-0001.params; {OWN}: "
        "what the backend writes (with mxnet these files, too)",
        one_of("format", (OWN, PARAMS)),
        OWN,
    )
    save_period: int = option(
        "Reports", "write checkpoints every this many epochs, and after the last", integer(1), 1, metavar="EPOCHS"
    )
    snapshot: int = option(
        "Reports",
        "also write a checkpoint every this many iterations, such as PREFIX-0001_iter_700; 0: off",
        integer(0),
        0,
        metavar="ITERATIONS",
    )
    snapshot_on_signal: float = option(
        "Reports",
        "also write a checkpoint when a worker gets SIGUSR1, within about so many seconds; 0: off",
        number(0.0),
        0.0,
        metavar="SECONDS",
    )
    load_epoch: int | None = option(
        "Reports",
        "resume from the checkpoint of this epoch; last: from the newest one, or start anew if there is none",
        epoch_or_last,
        metavar="EPOCH",
    )
    load_iteration: int | None = option(
        "Reports", "resume from the checkpoint of this iteration", integer(1), metavar="ITERATION"
    )
