"""The first minutes on a GPU: is everything right, then how fast is it? Ten minutes on one GPU and 16 cores.

    python benchmarks/first_minutes.py [--seconds 560] [--only equal,speed] [--small] [--data-dir DIR] [--out DIR]

It needs no network. Its stages (gpu/stages.py) are processes of their own with a limit each; a stage without enough
time left is skipped with a line. Results are printed at once, and kept in OUT/results.jsonl; at the end there are
tables for docs/performance.md, and which bars were reached. It ends with 1 if a stage failed or missed a bar. With
--small the stages are tried with little work, and no bar is about speed.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu.running import Asked, run_stage, serve_stage
from gpu.stages import STAGES
from report import INTERPRETER, PACKAGES, facts, installed, show
from tables.gpu import missed, table

LEAST_SECONDS = 15.0  # that a stage needs; and those that stay for the tables
RESERVE = 5.0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--seconds", type=float, default=560.0, help="for all stages (default %(default)s)")
    add("--only", metavar="STAGE,...", help=f"of {', '.join(STAGES)}")
    add("--small", action="store_true", help="little work, to try the stages")
    add("--data-dir", metavar="DIR", help="CIFAR-10's folder (default: images drawn at random)")
    add(
        "--out", default="gpu-out", metavar="DIR", help="for results.jsonl and the stages' errors (default %(default)s)"
    )
    add("--format", choices=["table", "json"], default="table")
    add("--stage", choices=list(STAGES), help=argparse.SUPPRESS)
    add("--interpreter", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    arguments.only = arguments.only.split(",") if arguments.only else list(STAGES)
    if unknown := set(arguments.only) - set(STAGES):
        parser.error(f"--only {','.join(sorted(unknown))}: choose of {', '.join(STAGES)}")
    if not arguments.seconds > 0:
        parser.error("--seconds must be more than 0")
    return arguments


def all_stages(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of all stages; each has its "stage"."""
    found: list[dict[str, Any]] = []
    end, out = time.monotonic() + arguments.seconds, Path(arguments.out)
    out.mkdir(parents=True, exist_ok=True)
    words = ["--small"] if arguments.small else []
    words += ["--data-dir", arguments.data_dir] if arguments.data_dir else []
    command = [*(INTERPRETER or [sys.executable]), str(Path(__file__).resolve()), *words]
    command += ["--interpreter", shlex.join(INTERPRETER)] if INTERPRETER else []
    for name in arguments.only:
        left = end - time.monotonic() - RESERVE
        if left < LEAST_SECONDS:
            found.append({"stage": name, "failed": "skipped: no time is left"})
            continue
        limit = min(STAGES[name].seconds, left)
        print(f"== {name}: at most {limit:.0f} s of {left:.0f} s", file=sys.stderr, flush=True)
        found += run_stage(name, [*command, "--stage", name], limit, out)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    if arguments.stage:
        sys.path[:0] = PACKAGES
        asked = Asked(arguments.small, tuple(shlex.split(arguments.interpreter)), arguments.data_dir)
        return serve_stage(STAGES[arguments.stage].rows, asked)
    rows = all_stages(arguments)
    versions = {name: installed(name) for name in ("dmltrain", "torch", "numpy")}
    show({"rows": rows, **facts("first_minutes.py", argv, versions)}, arguments.format, table)
    return 1 if missed(rows) else 0


if __name__ == "__main__":
    sys.exit(main())
