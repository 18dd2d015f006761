"""The sections of an experiment file that say how its results are shown, as one value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dmltrain.experiment.plan.definition import Experiment
from dmltrain.experiment.results.cell import plain
from dmltrain.experiment.results.column import ColumnNames, ResultColumn, columns
from dmltrain.experiment.results.derived import SCALES, SpeedUp
from dmltrain.experiment.results.fault import Fault, nearest
from dmltrain.experiment.results.measured import Value
from dmltrain.experiment.results.plots import Plot, plots
from dmltrain.experiment.results.published import Published, published
from dmltrain.experiment.results.sentence import Sentence, sentences

MEASURED = ("last_accuracy", "seconds_per_epoch", "samples_per_second")  # the columns of a file without columns
SPEED_UP = ("of", "over", "baseline")


@dataclass(frozen=True)
class Presentation:
    columns: tuple[ResultColumn, ...]
    plots: tuple[Plot, ...]
    published: tuple[Published, ...]
    sentences: tuple[Sentence, ...]
    speed_up: SpeedUp
    transpose: bool


def presentation(experiment: Experiment) -> Presentation:
    """How the results of `experiment` are shown. UserError with file and line for a name that is not known."""
    try:
        return _read(experiment)
    except Fault as fault:
        raise experiment.error(fault.place, fault.text) from None


def _read(experiment: Experiment) -> Presentation:
    content = experiment.content.value if isinstance(experiment.content.value, Mapping) else {}
    sections = {plain(str(name)): value for name, value in content.items()}
    names = names_of(experiment)
    shown = columns(list(experiment.columns) or _usual(experiment), names)
    return Presentation(
        columns=shown,
        plots=plots(list(experiment.plots), names),
        published=published(list(experiment.published), shown, names),
        sentences=sentences(sections.get("sentences") or [], names),
        speed_up=_speed_up(sections.get("speed_up") or {}, names, _scales(experiment)),
        transpose=experiment.transpose,
    )


def names_of(experiment: Experiment) -> ColumnNames:
    variables = frozenset(name for name in experiment.variables if name != "seed")
    return ColumnNames(variables, frozenset([*experiment.options, "workers", "servers"]))


def _usual(experiment: Experiment) -> list[str]:
    return [*(name for name in experiment.variables if name != "seed"), *MEASURED]


def _scales(experiment: Experiment) -> list[str]:
    """The variables in which a row differs from its baseline: those of SCALES, and what the file zips with one."""
    axes = [axis.names for grid in experiment.grids for axis in grid if set(axis.names) & set(SCALES)]
    return list(dict.fromkeys([*SCALES, *(name for axis in axes for name in axis)]))


def _speed_up(given: object, names: ColumnNames, scales: list[str]) -> SpeedUp:
    where = ("speed-up",)
    if not isinstance(given, Mapping):
        raise Fault(where, f"expected {{of: samples_per_second, over: [devices]}}, not {given!r}")
    for key in given:
        if key not in SPEED_UP:
            raise Fault((*where, key), f"there is no {key!r} of a speed-up: {nearest(str(key), SPEED_UP)}")
    over = given.get("over", scales)
    if not isinstance(over, list) or not all(isinstance(name, str) for name in over):
        raise Fault((*where, "over"), "expected a list of variables in which a row differs from its baseline")
    baseline = given.get("baseline") or {}
    if not isinstance(baseline, Mapping):
        raise Fault((*where, "baseline"), "expected settings of the baseline, such as {devices: 1}")
    variables = {plain(name) for name in names.variables}
    for name in [*(over if "over" in given else []), *baseline]:
        if plain(str(name)) not in variables:
            raise Fault(where, f"there is no variable {name!r}: {nearest(plain(str(name)), sorted(variables))}")
    of = given.get("of", SpeedUp.of)
    settings: dict[str, Value] = {str(name): value for name, value in baseline.items()}
    return SpeedUp(names.check(str(of), (*where, "of")), tuple(over), settings)
