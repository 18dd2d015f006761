"""--set NAME=VALUE: an option of all cells, instead of what the file says. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from dmltrain.base.errors import UserError
from dmltrain.experiment.plan.cell import OF_LAUNCHER
from dmltrain.experiment.plan.definition import Experiment
from dmltrain.experiment.plan.expression import Value
from dmltrain.experiment.plan.grid import needs
from dmltrain.experiment.plan.read_yaml import read
from dmltrain.experiment.plan.sections import NAME, dashed


def overridden(experiment: Experiment, words: Iterable[str]) -> Experiment:
    """The experiment with the entries of `options` and `launch` that the words give. UserError for one that cannot be.

    Values are written and computed as in the file. Names that no program knows are found with those of the file.
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
    """Whether an entry counts in cells with a variable of its name, as in the file."""
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
