"""The command line of dmltrain-experiment."""

from __future__ import annotations

import argparse
from pathlib import Path

NAME = "dmltrain-experiment"
RESULTS = Path("logs/experiments")
MOST_CELLS = 200  # that run without a question
EXAMPLES = """examples:
  dmltrain-experiment lr.yaml --dry-run                 the cells and their commands
  dmltrain-experiment lr.yaml --small                   a trial: what the file's section `small` says
  dmltrain-experiment lr.yaml                           run the cells that are neither done nor failed
  dmltrain-experiment lr.yaml --retry                   also those that failed
  dmltrain-experiment lr.yaml --only devices=2          only some cells; also --only 'devices > 1 and seed == 0'
  dmltrain-experiment lr.yaml --set num-epochs=3        another value of an option that all cells share
  dmltrain-experiment lr.yaml -H hosts -- --ssh system  on the hosts of a file; words after -- go to dmltrain-launch

exit code: 0 all cells are done, 1 some failed, 2 usage error or full disk, 130 interrupted
"""


def arguments(words: list[str]) -> argparse.Namespace:
    """What the command line says; rest: the words after --. SystemExit for --help and for a mistake."""
    place = words.index("--") if "--" in words else len(words)
    options = parser().parse_args(words[:place])
    options.rest = words[place + 1 :]
    return options


def parser() -> argparse.ArgumentParser:
    parser_of_all = argparse.ArgumentParser(
        prog=NAME,
        usage=f"{NAME} [options] FILE.yaml [-- options of dmltrain-launch]",
        description="Runs a grid of training runs from one file, and writes its tables, plots and page.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_options(parser_of_all)
    _add_modes(parser_of_all)
    return parser_of_all


def _add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("file", metavar="FILE", help="the experiment, a YAML file")
    add("--small", action="store_true", help="run the trial of the file's section `small`")
    add(
        "--set",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="an option of all cells, instead of what the file says; may be given several times",
    )
    add("--output", metavar="DIR", help=f"folder of the results (default: {RESULTS}/NAME)")
    add(
        "--only", metavar="WHICH", action="append", default=[], help="cells to run: name=value, an expression, or an ID"
    )
    add("--retry", action="store_true", help="run failed cells again")
    add("--add", action="store_true", help="the file has changed: keep the cells whose command is the same")
    add(
        "--at-once",
        metavar="N",
        type=_count,
        default=1,
        help="cells side by side, each on hosts of its own (default: 1)",
    )
    add("-H", "--hostfile", metavar="FILE", default="", help="hosts file, instead of the file's own")
    add("--launcher", metavar="NAME", default="", help="where to run, instead of what the file says")
    add("--yes", action="store_true", help=f"do not ask before more than {MOST_CELLS} cells")


def _add_modes(parser: argparse.ArgumentParser) -> None:
    """What to do instead of running cells."""
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--dry-run", action="store_true", help="print the cells and their commands")
    modes.add_argument("--check", action="store_true", help="only check options, hosts, devices, data and disk")
    modes.add_argument("--status", action="store_true", help="print which cells are done")
    modes.add_argument("--forecast", action="store_true", help="print how long the cells will take")
    modes.add_argument("--remake", action="store_true", help="only write tables, plots and page again")


def _count(word: str) -> int:
    if not word.isdecimal() or not 1 <= int(word) <= 1000:
        raise argparse.ArgumentTypeError(f"{word!r} is not a number from 1 to 1000")
    return int(word)
