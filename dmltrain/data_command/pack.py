"""`dmltrain-data pack`: image lists and .rec files, with all flags of MXNet's tools/im2rec.py."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from dmltrain.base.errors import UserError
from dmltrain.data.readers import FORMATS, image_folder, open_reader
from dmltrain.data_command import listing, verify
from dmltrain.data_command.ahead import check_threads
from dmltrain.data_command.encode import COLOURS, ENCODINGS, Encoding
from dmltrain.data_command.packing import Packing, check_targets, pack
from dmltrain.data_command.say import say

HELP = "pack images into .rec files, or write image lists (MXNet's im2rec)"
EXAMPLES = """examples:
  dmltrain-data pack train images/ --recursive --resize 256     list images/CLASS/*.JPEG, and pack train.rec
  dmltrain-data pack --list --recursive train images/           only write the list, train.lst
  dmltrain-data pack train images/                              pack the images that train.lst names
  dmltrain-data pack train ILSVRC2012_img_train.tar --resize 256 --num-thread 8
  dmltrain-data pack val ILSVRC2012_img_val.tar --devkit ILSVRC2012_devkit_t12.tar.gz --pass-through
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prefix", help="PREFIX.lst and PREFIX.rec are read and written")
    parser.add_argument("root", help="folder of the images, or any other format that the training programs read")
    lists = parser.add_argument_group("image lists")
    flag(lists, "--list", "only write the list")
    lists.add_argument("--exts", nargs="+", default=list(listing.EXTENSIONS), help="endings of images")
    lists.add_argument("--chunks", type=int, default=1, help="number of lists")
    lists.add_argument("--train-ratio", type=float, default=1.0, help="fraction of images for training")
    lists.add_argument("--test-ratio", type=float, default=0.0, help="fraction of images for testing")
    flag(lists, "--recursive", "also images in folders of the root, each folder a class; else only those in the root")
    flag(lists, "--shuffle", "random order (this is the default)", default=True)
    flag(lists, "--no-shuffle", "keep the order of names", target="shuffle", value=False)
    records = parser.add_argument_group("records")
    flag(records, "--pass-through", "store the files as they are")
    records.add_argument("--resize", type=int, default=0, help="length of the shorter edge; 0: as it is")
    flag(records, "--center-crop", "crop the largest square in the centre")
    records.add_argument(
        "--quality", type=int, default=None, help="JPEG's quality, 1 to 100 (default: 95), or PNG's compression, 1 to 9"
    )
    records.add_argument("--num-thread", type=int, default=1, help="number of threads")
    records.add_argument(
        "--color", type=int, default=1, choices=sorted(COLOURS), help="1: colour, 0: grey, -1: as the file has it"
    )
    records.add_argument("--encoding", default=".jpg", choices=ENCODINGS, help="format of the stored images")
    records.add_argument("--inter-method", type=int, default=1, help="interpolation, OpenCV's number")
    flag(records, "--pack-label", "store all labels of the list, not the first only")
    more = parser.add_argument_group("further options")
    more.add_argument("--devkit", help="ILSVRC2012_devkit_t12.tar.gz or its folder, for ILSVRC2012_img_val.tar")
    more.add_argument("--skip-broken", type=int, default=0, metavar="N", help="leave out up to N broken images")
    more.add_argument("--no-verify", action="store_true", help="do not decode all records once they are written")


def flag(group: argparse._ArgumentGroup, name: str, text: str, default: bool = False, **more: object) -> None:
    """A flag. MXNet before 1.2 wanted a value, which `old_values` has removed."""
    target, value = more.get("target", name[2:].replace("-", "_")), more.get("value", True)
    group.add_argument(name, dest=str(target), action="store_const", const=value, default=default, help=text)


FLAGS = ("--list", "--recursive", "--shuffle", "--pass-through", "--center-crop", "--pack-label")
TRUE, FALSE = ("1", "true"), ("0", "false")


def old_values(words: Sequence[str]) -> list[str]:
    """Without the values of flags: `--recursive True` or `--recursive=1` of older versions of im2rec."""
    kept: list[str] = []
    for word in words:
        name, _, value = word.partition("=")
        if name in FLAGS and value:
            kept.append(name)
            word = value
        if kept and kept[-1] in FLAGS and word.lower() in TRUE:
            continue
        if kept and kept[-1] in FLAGS and word.lower() in FALSE:
            previous = kept.pop()
            if previous == "--shuffle":
                kept.append("--no-shuffle")
            continue
        kept.append(word)
    return kept


def run(arguments: argparse.Namespace) -> int:
    check_threads(arguments.num_thread)
    prefix, root = Path(arguments.prefix), Path(arguments.root)
    parts = listing.ListDivision(arguments.chunks, arguments.train_ratio, arguments.test_ratio)
    folder = next((row for row in FORMATS if row.recognises(root)), None) is image_folder.FORMAT
    lists = _lists(prefix) if folder and not arguments.list else []
    if lists:
        say(f"packs what {', '.join(map(str, lists))} has; to look into {root} again, delete the list")
    if folder and not lists:
        lists = _write_lists(prefix, root, arguments, parts)
    if arguments.list:
        if not folder:
            raise UserError(f"{root}: --list needs a folder of images; other formats are packed without a list")
        return 0
    encoding = _encoding(arguments)
    sources = [(path.with_suffix(".rec"), _listed(path, root, encoding, arguments)) for path in lists]
    if not folder:
        sources = [(prefix.with_name(prefix.name + ".rec"), _other(root, encoding, arguments))]
    check_targets((target for target, _ in sources), [root])
    return max(_pack(target, packing, arguments) for target, packing in sources)


def _write_lists(prefix: Path, root: Path, arguments: argparse.Namespace, parts: listing.ListDivision) -> list[Path]:
    items = listing.find(root, arguments.recursive, arguments.exts)
    written = listing.write(prefix, listing.shuffled(items) if arguments.shuffle else items, parts)
    classes = len({item.label for item in items})
    say(f"{len(items)} images of {classes} classes: {', '.join(map(str, written))}")
    return written


def _lists(prefix: Path) -> list[Path]:
    """The lists whose path begins with the prefix, as im2rec finds them."""
    if not prefix.parent.is_dir():
        raise UserError(f"{prefix.parent}: no such folder; expected the folder for {prefix.name}.rec")
    return sorted(path for path in prefix.parent.glob("*.lst") if path.name.startswith(prefix.name))


def _encoding(arguments: argparse.Namespace) -> Encoding:
    quality = arguments.quality if arguments.quality is not None else 95 if arguments.encoding == ".jpg" else 3
    return Encoding(
        arguments.pass_through,
        arguments.center_crop,
        arguments.resize,
        quality,
        arguments.color,
        arguments.encoding,
        arguments.inter_method,
    )


def _listed(path: Path, root: Path, encoding: Encoding, arguments: argparse.Namespace) -> Packing:
    """The images that a list names, in its order."""
    reader = open_reader(path, root=root, warn=say)
    return Packing(reader, range(len(reader)), encoding, arguments.pack_label)


def _other(root: Path, encoding: Encoding, arguments: argparse.Namespace) -> Packing:
    """All images of another format, in random order: its own order is often that of the classes."""
    reader = open_reader(root, devkit=arguments.devkit, warn=say)
    order = listing.shuffled(range(len(reader))) if arguments.shuffle else range(len(reader))
    return Packing(reader, order, encoding, arguments.pack_label)


def _pack(target: Path, packing: Packing, arguments: argparse.Namespace) -> int:
    left_out = pack(packing, target, arguments.num_thread, arguments.skip_broken, say)
    note = f", {left_out} broken images left out" if left_out else ""
    say(f"{target}: {len(packing.order) - left_out} images{note}")
    if arguments.no_verify:
        return 0
    return verify.check([target], arguments.num_thread, several_labels=arguments.pack_label, numbers=False)
