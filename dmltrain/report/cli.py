"""The program dmltrain-parse; no other module of this package prints.

Exit codes: 0 success; 2 an error in the input (the rest is still shown); 141 the reader of the output has closed it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from dmltrain import record
from dmltrain.errors import UserError
from dmltrain.report import dialect, plot, reading
from dmltrain.report.run import Run
from dmltrain.report.table import AGGREGATES, Table, table
from dmltrain.report.text import FORMATS

_EXAMPLES = """examples:
  dmltrain-parse logs/r20                              the run in a folder: all workers' logs combined
  dmltrain-parse logs/r20 logs/r50 old.log             three runs side by side
  dmltrain-parse old.log --aggregate max --format csv
  dmltrain-parse logs/r20 --metric-names accuracy top_k_accuracy_5 --plot r20.png
  dmltrain-parse logs/r20 --metric-names communication --aggregate max
"""
_GROUPS = {"communication": record.COMMUNICATION}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit code."""
    try:
        return _report(_arguments(argv))
    except BrokenPipeError:
        return 141
    except KeyboardInterrupt:
        return 130


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="dmltrain-parse",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=_EXAMPLES,
        description=f"Tables of accuracy and time per epoch from the logs of {dialect.programs('and')}.",
    )
    parser.add_argument(
        "logs", nargs="*", metavar="LOG", help="a log file, a folder with the logs of one run, or - (standard input)"
    )
    parser.add_argument(
        "--format",
        choices=list(FORMATS),
        default="markdown",
        help="format of the table; none: separated by tabs (default: markdown)",
    )
    parser.add_argument(
        "--aggregate",
        choices=list(AGGREGATES),
        default="mean",
        help="how to combine the values of a run's workers (default: mean)",
    )
    parser.add_argument(
        "--metric-names",
        nargs="+",
        default=["accuracy"],
        metavar="NAME",
        help="metrics to show (default: accuracy); communication: where each epoch's time went",
    )
    parser.add_argument(
        "--plot", metavar="FILE", help="also plot accuracy and time per epoch to a file such as out.png"
    )
    arguments = parser.parse_args(argv)
    if not arguments.logs:  # in `--metric-names accuracy x.log` argparse takes the log for a name
        arguments.logs = [name for name in arguments.metric_names if os.path.exists(name)]
        arguments.metric_names = [name for name in arguments.metric_names if not os.path.exists(name)] or ["accuracy"]
    arguments.metric_names = [name for group in arguments.metric_names for name in _GROUPS.get(group, (group,))]
    if not arguments.logs:
        parser.error("no log given: expected a log file or a folder with the logs of one run (before --metric-names)")
    return arguments


def _report(arguments: argparse.Namespace) -> int:
    runs, faults = _read(arguments.logs)
    faults += [fault for run in runs for fault in run.faults]
    tables = [table(run, arguments.aggregate) for run in runs]
    faults += _write(FORMATS[arguments.format](tables, arguments.metric_names))
    if arguments.plot:
        faults += _plot(runs, arguments)
    for note in [note for run in runs for note in run.notes] + _unknown_metrics(tables, arguments.metric_names):
        _say("note", note)
    for fault in faults:
        _say("error", fault)
    return 2 if faults else 0


def _read(paths: Sequence[str]) -> tuple[list[Run], list[str]]:
    runs: list[Run] = []
    faults: list[str] = []
    for path in paths:
        try:
            runs += reading.read(path)
        except UserError as error:
            faults.append(str(error))
    return runs, faults


def _write(text: str) -> list[str]:
    """Write all of `text` to standard output; an unbuffered stream (python -u) may accept less at a time."""
    if not hasattr(sys.stdout, "buffer"):  # not a file, but an object that collects text
        sys.stdout.write(text)
        return []
    rest = memoryview(
        text.encode(sys.stdout.encoding or "utf-8", "backslashreplace")
    )  # file names may be invalid UTF-8
    try:
        while rest:
            rest = rest[sys.stdout.buffer.write(rest) :]
        sys.stdout.buffer.flush()  # before the messages, if both go to the same file
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # discards the rest of the buffer
        if isinstance(error, BrokenPipeError):
            raise
        return [f"the report cannot be written: {error.strerror}"]
    return []


def _plot(runs: Sequence[Run], arguments: argparse.Namespace) -> list[str]:
    one = "mean" if arguments.aggregate == "all" else arguments.aggregate
    try:
        plot.save([table(run, one) for run in runs if run.epochs], arguments.plot)
    except UserError as error:
        return [str(error)]
    return []


def _unknown_metrics(tables: Sequence[Table], names: Sequence[str]) -> list[str]:
    """Notes on names that no run has, which are probably typing errors."""
    keys = {key for one in tables for key in one.keys}
    known = sorted({key.partition("_")[2] for key in keys if key.startswith(("train_", "validation_"))})
    unknown = [name for name in names if not {key := record.metric(name), f"train_{key}", f"validation_{key}"} & keys]
    return [f"no log has a metric {name}; they have {', '.join(known)}" for name in unknown if known]


def _say(kind: str, text: str) -> None:
    line = f"dmltrain-parse: {kind}: {text}"
    print(line.encode("utf-8", "backslashreplace").decode(), file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
