"""Reads an experiment file to a value, with the changes by its section `small` and by the command line. The format:
docs/experiments.md."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from dmltrain.base.errors import UserError
from dmltrain.base.read_yaml import Content, bytes_of, read
from dmltrain.experiment.plan import difference
from dmltrain.experiment.plan.cell import OF_LAUNCHER
from dmltrain.experiment.plan.definition import Experiment
from dmltrain.experiment.plan.expression import Value
from dmltrain.experiment.plan.extends import SECTION as EXTENDS
from dmltrain.experiment.plan.extends import extended
from dmltrain.experiment.plan.grid import needs
from dmltrain.experiment.plan.sections import NAME, SECTIONS, SMALL, Sections, check_names, dashed

EXPECTED = "an experiment file, such as those in examples/experiments"
MOST_FILES = 4  # in a chain in which each file extends the next one
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,100}")


def load(path: str | os.PathLike[str], make_small: bool = False, words: Sequence[str] = ()) -> Experiment:
    """The experiment in the file at `path`; `words` are those of --set. UserError if it cannot be read or says
    something impossible."""
    return parse(bytes_of(path, EXPECTED), Path(path), make_small, words)


def parse(data: bytes, path: Path, make_small: bool = False, words: Sequence[str] = ()) -> Experiment:
    """The experiment in the content of the file `path`."""
    content = _content(data, path)
    stem = path.name.removesuffix(".yml").removesuffix(".yaml")
    if not FILE_NAME.fullmatch(stem):
        raise UserError(f"{path}: its name is also that of the results' folder: use letters, digits and - _ . + only")
    whole = Sections(content, ()).experiment(path, stem)
    made_small = _small(content, whole)  # also without --small, so that its mistakes show
    if not make_small:
        return _overridden(whole, words)
    if made_small is None:
        raise content.error((), "--small needs a section `small` in the file, with what is smaller in it")
    smaller = difference.of_cells(whole, made_small, "whole") or "nothing"
    return _overridden(replace(made_small, name=f"{stem}-small", small=smaller), words)


def _overridden(experiment: Experiment, words: Sequence[str]) -> Experiment:
    if not words:
        return experiment
    changed = overridden(experiment, words)
    return replace(changed, changed=difference.of_cells(experiment, changed, "in the file"))


def _content(data: bytes, path: Path, depth: int = 1) -> Content:
    """The content of the file, with what it inherits from a file that it extends."""
    content = read(data, str(path))
    if not isinstance(content.value, dict):
        raise content.error((), f"expected sections such as `program: train.py`: {', '.join(SECTIONS)}")
    check_names(content, (), SECTIONS, "section")
    name = content.value.get(EXTENDS)
    if name is None:
        return content
    if not isinstance(name, str) or not name:
        raise content.error((EXTENDS,), f"expected the path of a file, relative to this file, found {name!r}")
    if depth == MOST_FILES:
        raise content.error((EXTENDS,), f"more than {MOST_FILES} files extend each other: does one extend itself?")
    other = path.parent / os.path.expanduser(name)
    try:
        data = bytes_of(other, EXPECTED)
    except UserError as error:
        raise content.error((EXTENDS,), str(error)) from None
    return extended(content, _content(data, other, depth + 1), os.path.dirname(os.path.expanduser(name)))


def _small(content: Content, whole: Experiment) -> Experiment | None:
    """The experiment with its section `small`."""
    if "small" not in content.value:
        return None
    section = content.value["small"]
    if not isinstance(section, dict):
        raise content.error(("small",), f"expected sections such as `options:`: {', '.join(SMALL)}")
    check_names(content, ("small",), SMALL, "section of small")
    reader = Sections(content, ("small",))
    launch, arguments = reader.launch()
    return replace(
        whole,
        launch={**whole.launch, **launch},
        arguments=arguments or whole.arguments,
        options={**whole.options, **reader.options()},
        grids=reader.grids() if "grid" in section else whole.grids,
        where=reader.text("where") if "where" in section else whole.where,
        seeds=reader.seeds() if "seeds" in section else whole.seeds,
        time_limit=reader.time_limit() if "time-limit" in section else whole.time_limit,
    )


# ---- --set NAME=VALUE: an option of all cells, instead of what the file says ----------------------------------------


def overridden(experiment: Experiment, words: Iterable[str]) -> Experiment:
    """The experiment with the entries of `options` and `launch` that the words give. UserError for one that cannot be.

    Values are written and computed as in the file. Options that the program does not have are reported later, together
    with those of the file.
    """
    for word in words:
        name, value = _entry(word)
        if name.replace("-", "_") in experiment.variables and not _decides(experiment, value, word):
            raise UserError(
                f"--set {word}: {name} varies in the file's grid or seeds: expected an option that all cells share, or "
                f"an expression such as '{name}=cpu:{{{name}}}'; --only {word} chooses cells"
            )
        experiment = replace(experiment, overridden=(*experiment.overridden, name))
        if name in OF_LAUNCHER:
            experiment = replace(experiment, launch={**experiment.launch, name: value})
        else:
            experiment = replace(experiment, options={**experiment.options, name: value})
    return experiment


def _decides(experiment: Experiment, value: Value, word: str) -> bool:
    """Whether an entry decides the option although a variable has its name: it computes the option or leaves it out."""
    try:
        return value is None or bool(needs(value, frozenset(experiment.variables)))
    except UserError as error:
        raise UserError(f"--set {word}: {error}") from None


def _entry(word: str) -> tuple[str, Value]:
    """The name with dashes, and the value."""
    name, equals, text = word.partition("=")
    if not equals or not NAME.fullmatch(name.removeprefix("--")):
        raise UserError(f"--set {word}: expected NAME=VALUE, such as --set num-epochs=3")
    value = read(text.encode("utf-8", "replace"), f"--set {word}").value
    if isinstance(value, (list, dict)) or (isinstance(value, str) and ("\0" in value or "\n" in value)):
        raise UserError(f"--set {word}: expected one value: a number, true, null or text; quotes make all others text")
    return dashed(name), value
