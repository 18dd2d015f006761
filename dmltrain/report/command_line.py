"""The command line of dmltrain-parse."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence

from dmltrain.logs import record
from dmltrain.report import dialect
from dmltrain.report.summaries.series import AXES
from dmltrain.report.table import AGGREGATES
from dmltrain.report.text import FORMATS

DEFAULT_WIDTH = 120  # letters, where standard output is no terminal
_EXAMPLES = """examples:
  dmltrain-parse logs/r20                              the run in a folder: all workers' logs combined
  dmltrain-parse logs/r20 logs/r50 old.log             three runs side by side
  dmltrain-parse logs --summary                        one row for each run in a folder of runs
  dmltrain-parse --compare logs/r20 logs/r50           what differs, and whether it is more than noise
  dmltrain-parse logs/r20 --follow                     a job that runs: each epoch as it ends
  dmltrain-parse logs/r20 --x time --plot r20.png      over seconds instead of epochs
  dmltrain-parse old.log --aggregate max --format csv
  dmltrain-parse logs/r20 --metric-names accuracy top_k_accuracy_5 --plot r20.png
  dmltrain-parse logs/r20 --metric-names communication usage --aggregate max
"""
_GROUPS = {"communication": record.COMMUNICATION, "usage": record.USAGE_KEYS}


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options, and `logs`, the paths. Exits with 2 and a message on standard error if they are wrong."""
    parser = _parser()
    given = parser.parse_args(argv)
    if not given.logs:  # in `--metric-names accuracy x.log` argparse takes the log for a name
        given.logs = [name for name in given.metric_names if os.path.exists(name)]
        given.metric_names = [name for name in given.metric_names if not os.path.exists(name)] or ["accuracy"]
    given.metric_names = [name for group in given.metric_names for name in _GROUPS.get(group, (group,))]
    if problem := _problem(given):
        parser.error(problem)
    return given


def _problem(given: argparse.Namespace) -> str:
    if given.follow and (wrong := _problem_with_follow(given)):
        return wrong
    if given.compare and given.logs:
        return f"--compare takes two runs, or two folders of runs, and no other log: what is {given.logs[0]}?"
    if not given.compare and not given.logs:
        return "no log given: expected a log file or a folder with the logs of one run (before --metric-names)"
    option = "--compare" if given.compare else "--summary" if given.summary else ""
    if given.compare and (given.summary or given.plot):
        return "--compare has a text of its own: leave out --summary and --plot"
    if option and given.aggregate == "all":
        return f"{option} needs one value of all workers: --aggregate mean, max or last; all is for the table of epochs"
    if option and given.x and not given.plot:
        return f"--x is for the table of epochs and the plot: leave it out, or {option}"
    return ""


def _problem_with_follow(given: argparse.Namespace) -> str:
    """What is wrong with the options beside --follow; "" if nothing is."""
    others: Sequence[tuple[str, object]] = (
        ("--summary", given.summary),
        ("--compare", given.compare),
        ("--plot", given.plot),
        ("--x", given.x),
        ("--format json", given.format == "json"),
    )
    wrong = [name for name, value in others if value]
    if wrong:
        return f"--follow shows the table of epochs as it grows: leave out {wrong[0]}"
    if len(given.logs) != 1 or given.logs[0] == "-":
        return "--follow takes one log or one folder of logs, such as logs/JOB"
    return ""


def width(wide: bool) -> int | None:
    """The letters of a line of the table; None: no limit. In a terminal, COLUMNS is stronger than its size."""
    if wide:
        return None
    return shutil.get_terminal_size((DEFAULT_WIDTH, 24)).columns if _in_terminal() else DEFAULT_WIDTH


def _in_terminal() -> bool:
    """What collects text, as in a notebook, may not say."""
    return bool(getattr(sys.stdout, "isatty", bool)())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dmltrain-parse",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=_EXAMPLES,
        description=f"Tables of accuracy and time per epoch from the logs of {dialect.programs('and')}.",
    )
    parser.add_argument(
        "logs", nargs="*", metavar="LOG", help="a log file, a folder with the logs of one run, or - (standard input)"
    )
    _add_views(parser)
    _add_contents(parser)
    return parser


def _add_views(parser: argparse.ArgumentParser) -> None:
    """What is shown of the logs."""
    parser.add_argument(
        "--summary",
        action="store_true",
        help="one row for each run: options, speed, accuracy, memory, where the time went; a folder of runs has a row "
        "for each of them",
    )
    parser.add_argument(
        "--compare",
        nargs=2,
        metavar=("A", "B"),
        help="what differs between two runs, or two folders of several runs each: options, machines, versions, "
        "accuracy, time; and whether the difference is larger than the noise",
    )
    parser.add_argument(
        "--follow",
        action="store_true",
        help="the table of a job that runs: new rows appear as epochs end, until the job ends, or Ctrl-C",
    )


def _add_contents(parser: argparse.ArgumentParser) -> None:
    """What a table has, and how it looks."""
    parser.add_argument(
        "--x",
        choices=list(AXES),
        help="first column of the table and axis of the plot: epoch, iteration (steps), or time (seconds since the "
        "run's first log line); default: the epoch, or the iteration in logs that count iterations",
    )
    parser.add_argument(
        "--wide",
        action="store_true",
        help="never shorten a table to the width of the terminal "
        f"({DEFAULT_WIDTH} letters where there is none; csv and json are never shortened)",
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
        help="metrics to show (default: accuracy); communication: where each epoch's time went; usage: of CPUs, "
        "memory and GPUs",
    )
    parser.add_argument(
        "--plot", metavar="FILE", help="also plot accuracy and time per epoch to a file such as out.png"
    )
