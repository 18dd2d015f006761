"""`dmltrain-data index`: makes the .idx of .rec files anew (MXNet's tools/rec2idx.py)."""

from __future__ import annotations

import argparse
from pathlib import Path

from dmltrain.data.readers import open_reader
from dmltrain.data_command.say import say
from dmltrain.errors import UserError

HELP = "make the index of .rec files anew"
EXAMPLES = """examples:
  dmltrain-data index train.rec
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("records", nargs="+", metavar="FILE.rec", help="the index becomes FILE.idx")


def run(arguments: argparse.Namespace) -> int:
    for path in map(Path, arguments.records):
        if path.suffix != ".rec":
            raise UserError(f"{path}: expected a .rec file; other formats need no index of yours")
        if not path.exists():
            raise UserError(f"{path}: no such file")
        old = path.with_suffix(".idx")
        kept = path.with_suffix(".idx.old")
        if old.exists():
            old.replace(kept)
        try:
            reader = open_reader(path, warn=say)
        except UserError:
            if kept.exists():
                kept.replace(old)  # the .rec is damaged: its index stays as it was
            raise
        kept.unlink(missing_ok=True)
        say(f"{old}: {len(reader)} records")
    return 0
