"""Packs the records of a reader into a .rec: in parallel, and resumable."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from dmltrain.base import whole_file
from dmltrain.base.errors import UserError
from dmltrain.data.broken import BrokenEstimate, estimate_broken
from dmltrain.data.readers import Reader, Record, recordio
from dmltrain.data.readers.record_writer import RecordWriter
from dmltrain.data_command.ahead import in_order
from dmltrain.data_command.encode import Encoding, NotEncoded
from dmltrain.data_command.progress import progress

LARGEST = recordio.MAX_BYTES - (1 << 20)  # bytes of an image: leaves room for the labels
COMPARED = 1000  # images whose places two runs compare


@dataclass(frozen=True)
class Packed:
    """One image, ready to be written; `problem` if it cannot be."""

    number: int
    labels: tuple[float, ...]
    content: bytes
    problem: str = ""


@dataclass(frozen=True)
class Packing:
    """What to pack, and how. `order`: numbers of the reader's records; pack_label: all labels, not the first only."""

    reader: Reader
    order: Sequence[int]
    encoding: Encoding
    pack_label: bool = False

    def check_labels(self, index: int, record: Record) -> None:
        """UserError: there are several, and only one is to be stored."""
        if not self.pack_label and len(record.labels) > 1:
            raise UserError(
                f"{self.reader.where(index)}: it has {len(record.labels)} labels, expected one (a label width of 1): "
                "the first alone may be no class; --pack-label stores them all"
            )

    def image(self, index: int) -> Packed:
        """Read and encode one record."""
        record = self.reader.read(index)
        self.check_labels(index, record)
        labels = tuple(map(float, record.labels))
        number = self.reader.number(index)
        try:
            content = self.encoding(record.image)
            if len(content) > LARGEST:
                raise NotEncoded(f"it has {len(content)} bytes, and a record at most {LARGEST}; make it smaller")
            return Packed(number, labels, content)
        except NotEncoded as problem:
            return Packed(number, labels, b"", f"{self.reader.where(index)}: {problem}")

    def estimate_broken(self) -> BrokenEstimate:
        """How many of some images are broken."""
        return estimate_broken(self._is_broken, len(self.order))

    def _is_broken(self, place: int) -> bool:
        try:
            return bool(self.image(self.order[place]).problem)
        except UserError:
            return True

    def fingerprint(self) -> str:
        """A text that is equal for two runs with the same images and options. The content of images does not count,
        because the user may have replaced broken ones between the runs."""
        digest = hashlib.sha256(" ".join(map(str, self.order)).encode())
        for index in self.order[:: max(1, len(self.order) // COMPARED)]:
            digest.update(self.reader.where(index).encode("utf-8", "surrogateescape"))
        return json.dumps({"images": digest.hexdigest(), "pack_label": self.pack_label, **asdict(self.encoding)})


def check_targets(targets: Iterable[Path], sources: Iterable[Path]) -> None:
    """UserError: a file that is read would be replaced."""
    read = {source.resolve() for source in sources}
    for target in targets:
        if target.resolve() in read:
            raise UserError(f"{target}: this file is read, and would be replaced; give another name for the new one")


def pack(packing: Packing, target: Path, threads: int, skip_broken: int, warn: Callable[[str], None]) -> int:
    """Write `target` (.rec) and its .idx, or go on with what an interrupted run left of them.

    Returns the number of images that were left out. UserError: more than `skip_broken` are broken; what was written
    stays, so that the next run goes on behind it.
    """
    state = target.with_name(target.name + ".part.json")
    if packing.order:
        packing.check_labels(packing.order[0], packing.reader.read(packing.order[0]))  # before a part is begun
    with contextlib.closing(RecordWriter(target, resume=_resumable(state, packing, target, warn))) as writer:
        whole_file.write(state, packing.fingerprint().encode())
        broken = _write(packing, writer, target, threads, skip_broken, warn)
    state.unlink()
    return broken


def _write(
    packing: Packing, writer: RecordWriter, target: Path, threads: int, skip_broken: int, warn: Callable[[str], None]
) -> int:
    """Write the images that are not in the part. Returns the number that was left out."""
    done = set(writer.keys)
    left = [index for index in packing.order if packing.reader.number(index) not in done] if done else packing.order
    if done:
        warn(f"{target}: goes on after {len(done)} images of an interrupted run")
    broken, repeats = 0, dict[int, None]()
    seen = set(done)
    with progress(f"pack {target.name}", len(packing.order), len(done)) as advance:
        for count, image in enumerate(in_order(packing.image, left, threads), len(done) + 1):
            if image.problem:
                broken += 1
                _allow(image.problem, broken, skip_broken, warn, packing.estimate_broken)
            else:
                labels = image.labels[0] if len(image.labels) == 1 else image.labels  # as im2rec: one is no vector
                writer.write(labels, image.number, image.content)
                if image.number in seen:
                    repeats[image.number] = None
                seen.add(image.number)
            advance(count)
    if not writer.keys:
        raise UserError(f"{target}: none of the {len(packing.order)} images can be packed; see the lines above")
    writer.finish()
    if repeats:
        warn(
            f"{target}: {len(repeats)} numbers are those of several images, the first of them {next(iter(repeats))}: "
            "by the index only one of each is found; give each line of the list its own number"
        )
    return broken


def _resumable(state: Path, packing: Packing, target: Path, warn: Callable[[str], None]) -> bool:
    """Whether an interrupted run with the same images and options left a part. UserError: with others."""
    if not state.exists():
        return False
    if state.read_text() != packing.fingerprint():
        raise UserError(
            f"{target}.part was begun with other images or options: give the same again to go on with it, or delete "
            f"{target}.part and {state.name} to begin anew"
        )
    if not target.with_name(target.name + ".part").exists():
        return False
    if len({packing.reader.number(index) for index in packing.order}) < len(packing.order):
        warn(f"{target}: begins anew: some images have the same number, so that nobody can tell which of them are done")
        return False
    return True


def _allow(
    problem: str, broken: int, skip_broken: int, warn: Callable[[str], None], others: Callable[[], BrokenEstimate]
) -> None:
    if broken <= skip_broken:
        return warn(f"left out: {problem}")
    rest = others()
    if rest.nearly_all:
        raise UserError(f"{problem}. {rest}: these are other files than expected, or another root of the images")
    most = max(broken, rest.expected)
    raise UserError(
        f"{problem}. Replace this image, or leave out up to {most} such images with --skip-broken {most} ({rest}); "
        "the next run goes on here"
    )
