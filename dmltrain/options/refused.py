"""Options of MXNet's and Caffe's programs that dmltrain does not have: why, and what to use instead.

MXNet's are those of example/image-classification at v1.9.x and of its older versions; Caffe's are fields of its
SolverParameter. An option that is neither here nor in Options is unknown.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from dmltrain.base.errors import UserError
from dmltrain.options.table import FLAGS


@dataclass(frozen=True)
class Refused:
    """A row of REFUSED. `reason` is a sentence without a full stop; `instead` an order."""

    reason: str
    instead: str


def _renamed(to: str, here: str) -> Refused:
    return Refused(f"here its name is {to}", f"use {here}")


_PROFILE = Refused(
    "it profiles MXNet's engine, and dmltrain has no profiler",
    "read the lines Communication of the log, which say where an epoch's time went, or start the program under a "
    "profiler such as py-spy",
)
_BENCHMARK = "use benchmarks/networks.py, which has MXNet's benchmark.py's options"

REFUSED = {
    # MXNet's programs, v1.9.x
    "--profile-worker-suffix": _PROFILE,
    "--profile-server-suffix": _PROFILE,
    "--networks": Refused("it belongs to MXNet's benchmark.py", _BENCHMARK),
    "--worker-file": Refused("it belongs to MXNet's benchmark.py", _BENCHMARK),
    "--worker-count": Refused("it belongs to MXNet's benchmark.py", _BENCHMARK),
    "--gpu-count": Refused("it belongs to MXNet's benchmark.py", _BENCHMARK),
    # MXNet's programs, older versions
    "--kv-type": _renamed("--kv-store", "--kv-store"),
    "--lr-factor-epoch": _renamed("--lr-step-epochs", "--lr-policy step --lr-step-epochs E"),
    "--use-python-iter": Refused("there is one reader of images", "leave it out"),
    "--use-gpu-augmenter": Refused("images are augmented on the CPU", "give --data-nthreads more threads"),
    "--log-file": Refused("the log goes to standard error", "redirect it with 2> FILE, or read the launcher's logs"),
    "--log-dir": Refused("the log goes to standard error", "give --log-dir to dmltrain-launch"),
    # Caffe's solvers
    "--base-lr": _renamed("--lr", "--lr"),
    "--gamma": _renamed("--lr-factor", "--lr-factor"),
    "--power": _renamed("--lr-power", "--lr-power"),
    "--stepsize": _renamed("--lr-step-iterations", "--lr-policy step --lr-step-iterations I"),
    "--stepvalue": _renamed("--lr-step-iterations", "--lr-policy multistep --lr-step-iterations I,I"),
    "--momentum": _renamed("--mom", "--mom"),
    "--weight-decay": _renamed("--wd", "--wd"),
    "--display": _renamed("--disp-batches", "--disp-batches"),
    "--snapshot-prefix": _renamed("--model-prefix", "--model-prefix"),
    "--random-seed": _renamed("--seed", "--seed"),
    "--iter-size": Refused(
        "it counts batches in a step, which --macrobatch-size gives in samples",
        "use --macrobatch-size with iter_size * batch size * number of workers",
    ),
    "--test-iter": Refused("a test is one pass over the whole validation set", "leave it out"),
    "--average-loss": Refused("the log has means over --disp-batches batches", "leave it out"),
    "--solver-mode": Refused("the devices decide it", "use --gpus or --devices"),
    "--solver-type": _renamed("--optimizer", "--optimizer"),
}


def check(word: str) -> None:
    """Raise UserError for a word of the command line that is such an option."""
    name = word.split("=")[0]
    row = REFUSED.get(name)
    if row:
        raise UserError(f"{name}: {row.reason}; {row.instead}")


def unknown(word: str) -> str:
    """The message for an option that there is not."""
    name = word.split("=")[0]
    near = difflib.get_close_matches(name, FLAGS, n=1, cutoff=0.7)
    hint = f" (did you mean {near[0]}?)" if near else ""
    return f"unknown option {name}{hint}; valid options: {' '.join(FLAGS)}"
