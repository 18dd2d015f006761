"""Mutated sections of an experiment file: read, or refused with file and line."""

import pytest

from dmltrain.errors import UserError
from dmltrain.experiment.results.presentation import presentation
from tests.experiment.results import made
from tests.fuzzing import Fuzzed, parts, survive

HEAD = "program: x\ngrid: {devices: [1], kv-store: [a]}\n"
SECTIONS = (
    "columns: [devices, {accuracy: {value: last_accuracy, percent: true, digits: 1}}, {x: devices * 2}, speed_up]\n",
    "speed-up: {of: steps_per_second, over: [devices], baseline: {devices: 1}}\n",
    "sentences: [fastest, {most-accurate: best_accuracy}]\nplots: [speed-up]\n",
    "plots: [{curves: {y: test_error, x: time, panels: kv-store, log: true, title: Error}}]\n",
    "plots: [{bars: {x: devices, y: last_accuracy, series: [kv-store], where: devices > 1}}]\n",
    """\
published:
  - {title: T, source: S, place: table, units: {devices: value / 2}, rows: [{devices: 8}, {kv-store: "0.50"}],
     errors: [{where: {column: devices}, printed: 8, correct: value * 2, why: because}]}
""",
)
WORDS = (
    *(b"columns", b"plots", b"published", b"errors", b"where", b"correct", b"value", b"devices", b"- ", b"{", b"}"),
    *(b"[", b"]", b": ", b"null", b"true", b"1e308", b"-1", b".nan", b"&a ", b"*a", b"**", b"/ 0", b"speed_up"),
)


def read(data: bytes) -> object:
    return presentation(made.experiment(data.decode("utf-8", "replace")))


PRESENTATION = Fuzzed(read, lambda: [f"{HEAD}{section}".encode() for section in SECTIONS], (UserError,), WORDS)


@pytest.mark.thorough
@pytest.mark.parametrize("part", parts())
def test_mutated_sections_are_read_or_refused(part):
    survive("tests.experiment.results.test_fuzz:PRESENTATION", part)
