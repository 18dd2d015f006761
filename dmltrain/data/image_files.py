"""A data set from files of labelled images, in any of the formats of readers/."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from dmltrain.base.errors import UserError
from dmltrain.base.normalisation import Normalisation
from dmltrain.data.broken import SkippedRecords
from dmltrain.data.dataset import Dataset, ImageFiles, Shape, examples_to_use
from dmltrain.data.decoded import Decoded
from dmltrain.data.readers import Reader, open_reader


def load(
    name: str, files: ImageFiles, shape: Shape, normalisation: Normalisation, num_examples: int | None = None
) -> Dataset:
    """The data set `name` from `files`; these may be for training only, or for validation only. num_examples: use only
    so many training samples, the first.

    UserError: missing or damaged files, or no number of classes.
    """
    files.augmentation.check(shape)
    train = _reader(files, files.train, files.train_index)
    validation = _reader(files, files.validation, files.validation_index)
    readers = [reader for reader in (train, validation) if reader is not None]
    if not readers:
        raise UserError(f"--dataset {name}: no images; give --data-train, for example --data-train train.rec")
    classes = _num_classes(files, readers)
    broken = SkippedRecords(files.skip_broken, files.warn)

    def decoded(reader: Reader | None, count: int) -> Decoded:
        return Decoded(reader or readers[0], count, files.augmentation, shape, classes, broken)

    return Dataset(
        name,
        decoded(train, examples_to_use(num_examples, len(train)) if train else 0),
        decoded(validation, len(validation) if validation else 0),
        classes,
        shape,
        normalisation,
        _digests(train, validation),
        broken,
    )


def _reader(files: ImageFiles, paths: Sequence[str], index: str | None) -> Reader | None:
    if not paths:
        return None
    reader = open_reader(paths, index=index, root=files.root, devkit=files.devkit, warn=files.warn)
    if not len(reader):
        raise UserError(f"{', '.join(paths)}: there are no images, expected at least one")
    return reader


def _num_classes(files: ImageFiles, readers: Sequence[Reader]) -> int:
    named = [reader.class_names for reader in readers if reader.class_names]
    if len(named) == 2 and named[0] != named[1]:
        raise UserError(
            f"the training data have {len(named[0])} classes and the validation data {len(named[1])}, or others: the "
            "same label would mean two classes; give data with the same classes"
        )
    if files.num_classes is not None:
        return files.num_classes
    if named:
        return len(named[0])
    raise UserError(f"{readers[0].where(0)}: its file does not tell the number of classes: give --num-classes")


def _digests(train: Reader | None, validation: Reader | None) -> dict[str, str]:
    nothing = hashlib.sha256(b"").hexdigest()
    names = [reader.class_names for reader in (train, validation) if reader]
    return {
        "training data": train.digest() if train else nothing,
        "validation data": validation.digest() if validation else nothing,
        "classes": hashlib.sha256(repr(names).encode()).hexdigest(),
    }
