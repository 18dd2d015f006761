"""`dmltrain-data partition`: divides a data set into one .rec for each worker, and copies each to its worker's host.

The training programs read such parts with --data-parts local: no shared disk, and each worker reads a part of the
bytes only (as PMLS-Caffe did for ImageNet-22K).
"""

from __future__ import annotations

import argparse
import contextlib
import random
import shlex
from collections.abc import Sequence
from pathlib import Path

from dmltrain.base.errors import UserError
from dmltrain.data.readers import Reader, open_reader
from dmltrain.data.readers.record_writer import RecordWriter
from dmltrain.data_command import copying
from dmltrain.data_command.packing import check_targets
from dmltrain.data_command.progress import progress
from dmltrain.data_command.say import say

HELP = "divide a data set into one .rec for each worker, and copy each to its worker's host"
EXAMPLES = """examples:
  dmltrain-data partition train.rec --parts 5 --out parts
  dmltrain-data partition train.rec --parts 3 --weights 2,1,1 --out parts   the first worker has half of the images
  dmltrain-data partition train.rec --parts 5 --out parts -H hosts -s 5 --to '/data/train-{rank}.rec'
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("data", nargs="+", help="files or folders of images, in any format that the programs read")
    parser.add_argument("--root", help="folder of the images that a .lst names")
    parser.add_argument("--devkit", help="ILSVRC2012_devkit_t12.tar.gz or its folder, for ILSVRC2012_img_val.tar")
    parser.add_argument("--parts", type=int, required=True, metavar="N", help="number of workers")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for part-0.rec, part-1.rec, ...")
    parser.add_argument("--weights", metavar="W,W", help="relative sizes of the parts (default: equal)")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of the images of each part")
    hosts = parser.add_argument_group("copying")
    hosts.add_argument("-H", "--hostfile", metavar="FILE", help="hosts file of the job that will train")
    hosts.add_argument("--hosts", metavar="A:2,B:4", help="hosts of the job, instead of a hosts file")
    hosts.add_argument(
        "-s", "--num-servers", metavar="N", help="servers of the job: the launcher places workers after them"
    )
    hosts.add_argument("--placement", metavar="POLICY", help="--placement of the job, if it has one")
    hosts.add_argument(
        "--to", metavar="PATH", help="path of the part on its worker's host; {rank} is the worker's number"
    )
    hosts.add_argument("--ssh", default="ssh", metavar="COMMAND", help="the SSH command, such as 'ssh -F config'")
    hosts.add_argument("--copy-only", action="store_true", help="copy the parts that are in --out already")


def run(arguments: argparse.Namespace) -> int:
    weights = _weights(arguments.weights, arguments.parts)
    targets = [arguments.out / f"part-{rank}.rec" for rank in range(arguments.parts)]
    # mistakes come before the long work
    copies = copying.copies(_placing(arguments), arguments.to, targets, _command(arguments.ssh))
    if arguments.copy_only:
        if missing := [str(path) for path in targets if not path.exists()]:
            raise UserError(f"--copy-only: {', '.join(missing)}: no such file; leave --copy-only out to make the parts")
    else:
        check_targets(targets, map(Path, arguments.data))
        reader = open_reader(arguments.data, root=arguments.root, devkit=arguments.devkit, warn=say)
        divide(reader, targets, weights, arguments.seed)
    for copy in copies:
        say(f"{copy.source.name} -> {copy}")
        copying.copy(copy)
    return 0


def divide(reader: Reader, targets: Sequence[Path], weights: Sequence[float], seed: int) -> None:
    """Write each record to one of the targets (.rec), in the reader's order; sizes in proportion to the weights."""
    owners = owner_of_each(len(reader), weights, seed)
    targets[0].parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack, progress("partition", len(reader)) as advance:
        writers = [stack.enter_context(contextlib.closing(RecordWriter(target))) for target in targets]
        for index, owner in enumerate(owners):
            record = reader.read(index)
            if not isinstance(record.image, bytes):
                raise UserError(f"{reader.where(index)}: it has pixels; pack the data with dmltrain-data pack first")
            labels = record.labels.tolist()
            writers[owner].write(labels[0] if len(labels) == 1 else labels, reader.number(index), record.image)
            advance(index + 1)
        for writer in writers:
            writer.finish()
    for target, size in zip(targets, part_sizes(len(reader), weights), strict=True):
        say(f"{target}: {size} images")


def owner_of_each(count: int, weights: Sequence[float], seed: int) -> bytes | list[int]:
    """The part of each record, at random, so that every part has images of all classes."""
    sizes = part_sizes(count, weights)
    owners = [part for part, size in enumerate(sizes) for _ in range(size)]
    compact = bytearray(owners) if len(weights) <= 256 else owners
    random.Random(seed).shuffle(compact)
    return bytes(compact) if isinstance(compact, bytearray) else compact


def part_sizes(count: int, weights: Sequence[float]) -> list[int]:
    """Numbers of records in proportion to the weights, by largest remainder; none is empty."""
    exact = [count * weight / sum(weights) for weight in weights]
    sizes = [int(size) for size in exact]
    by_remainder = sorted(range(len(weights)), key=lambda part: sizes[part] - exact[part])
    for part in by_remainder[: count - sum(sizes)]:
        sizes[part] += 1
    if min(sizes) < 1:
        raise UserError(f"{count} images cannot be divided into {len(weights)} parts with at least one image each")
    return sizes


def _placing(arguments: argparse.Namespace) -> list[str]:
    """Options of dmltrain-launch, on which the hosts of the workers depend."""
    given = {
        "-H": arguments.hostfile,
        "--hosts": arguments.hosts,
        "-s": arguments.num_servers,
        "--placement": arguments.placement,
    }
    return [word for option, value in given.items() if value is not None for word in (option, value)]


def _command(text: str) -> list[str]:
    try:
        words = shlex.split(text)
    except ValueError:  # a quote without its end
        words = []
    if not words:
        raise UserError(f"--ssh {text}: expected a command, such as 'ssh -F config'")
    return words


def _weights(text: str | None, parts: int) -> list[float]:
    if parts < 1:
        raise UserError(f"--parts {parts}: expected 1 or more")
    if text is None:
        return [1.0] * parts
    try:
        weights = [float(word) for word in text.split(",")]
    except ValueError:
        weights = []
    if len(weights) != parts or not all(0 < weight < float("inf") for weight in weights):
        raise UserError(f"--weights {text}: expected {parts} numbers above 0, for example {','.join('1' * parts)}")
    return weights
