"""`dmltrain-data index`: rebuilds the .idx of .rec files, like MXNet's tools/rec2idx.py."""

from __future__ import annotations

import argparse
from pathlib import Path

from dmltrain.base import whole_file
from dmltrain.base.errors import UserError
from dmltrain.data.readers import record_index
from dmltrain.data.readers.data_file import Damaged, DataFile
from dmltrain.data_command.say import say

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
        target = path.with_suffix(".idx")
        try:
            index = record_index.scan(DataFile(path))
        except Damaged as error:
            raise UserError(f"{path}: {error}") from None
        whole_file.write(target, record_index.text(index))
        say(f"{target}: {len(index.offsets)} records")
    return 0
