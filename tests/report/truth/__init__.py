"""Logs from known tables, each dialect's as its programs write them: the table comes back, or a note says why not.

`python -m tests.report.truth --count 20000` tries many; a log is a function of its dialect and number, so that
`--dialect Keras --first 4711 --count 1 --show` repeats one. `known` has the tables and judges, `log` makes a file of
what a program prints, and each other module writes as the programs of a dialect do.
"""

import io
from collections.abc import Callable
from functools import partial
from random import Random

from dmltrain.report import reading
from dmltrain.report.runs.run import Run, merge
from tests.report.truth import caffe, csv_logger, estimator, keras, lightning, log, mxnet, tensorboard
from tests.report.truth.known import Case, Program, verdict


def _of_program(program: Callable[[Random], Program], random: Random) -> Case:
    return log.case(random, program(random))


PROGRAMS: dict[str, Callable[[Random], Program]] = {
    "MXNet": mxnet.program,
    "Estimator": estimator.program,
    "PMLS": caffe.pmls,
    "Caffe": caffe.program,
    "Keras": keras.program,
    "CSVLogger": csv_logger.program,
    "Lightning": lightning.program,
}


MAKERS: dict[str, Callable[[Random], Case]] = {
    **{dialect: partial(_of_program, program) for dialect, program in PROGRAMS.items()},
    "TensorBoard": tensorboard.case,
}


class _File(io.BytesIO):
    name = ""


def case(dialect: str, number: int) -> Case:
    random = Random(f"{dialect} {number}")
    return MAKERS[dialect](random)


def read(made: Case) -> list[Run]:
    """The runs of the files, as of a folder."""
    surveys = []
    for name, data in made.files.items():
        file = _File(data)
        file.name = name
        surveys.append((name, reading.survey(file)))
    counts = {len(survey.runs) for _, survey in surveys}
    if counts == {0}:
        return [Run("x", faults=tuple(survey.fault for _, survey in surveys))]
    return [
        merge("x", [(name, survey.runs[part]) for name, survey in surveys], part, heads=[surveys[0][1].head])
        for part in range(min(counts))
    ]


def judge(dialect: str, number: int) -> str:
    """exact, noted, or what is wrong with a log."""
    made = case(dialect, number)
    said = verdict(made, read(made))
    return said if said in ("exact", "noted") else f"{said} ({made.description})"
