"""Mutated experiments and expressions: each is read or refused, in limited memory and time (tests/fuzzing.py)."""

import contextlib
from pathlib import Path

import pytest

from dmltrain.base.errors import UserError
from dmltrain.experiment import answers, forecast, launch
from dmltrain.experiment.plan import expression
from dmltrain.experiment.plan.cell import cells
from dmltrain.experiment.plan.file import parse
from dmltrain.experiment.results.presentation import presentation
from dmltrain.experiment.store import parsed, state
from dmltrain.options import FLAGS
from dmltrain.report.runs import job_record
from tests.experiment.results import made
from tests.fuzzing import Fuzzed, parts, survive

FILES = [  # short ones, because YAML in pure Python is slow
    b"program: t.py\ngrid: {lr: [1, 2 * wd], wd: 3}\nseeds: [0, 1]\n",
    b"program: &t t.py\ngrid:\n- zip: {mom: [a, *t], workers: [1, 5]}\n- mom: 2\nwhere: mom == 2\n",
    b'program: t.py\noptions: {wd: 1e-3, data-dir: "p{seed}"}\nseeds: 3\n',
    b"program: t.py\nlaunch: {workers: 2, args: [-v]}\nsmall: {options: {wd: 2}}\n",
]
VALUES = {"devices": 4, "workers": 2, "kv_store": "dist_sync"}


def read_file(data: bytes) -> object:
    return [each.words for each in cells(parse(data, Path("x.yaml"), b"small:" in data), FLAGS).all]


def read_expression(data: bytes) -> object:
    text = data.decode("utf-8", "replace")
    try:
        return expression.parse(text).value(VALUES)
    except UserError:
        return expression.filled(text, VALUES)


WORDS = (b"&t ", b"*t", b"[", b"{", b"}", b"\n", b": ", b"- ", b"!!int ", b"<<: *t\n", b"devices", b" * 10", b"** ")
FILE = Fuzzed(read_file, lambda: FILES, (UserError,), (*WORDS, b"null"))
EXPRESSIONS = [
    b"round(0.05 * devices / workers, 3) if kv_store in ['local', 'dist_sync'] else -min(devices, 2) ** 2 // 1",
    b"cpu:{devices * 2}-{workers}",
    b"not devices >= 1 <= workers or 1e9 % 7",
]
PARTS = (
    *(b"**", b"9" * 17, b"1e299", b"devices", b"(", b")", b"round(", b", "),
    *(b"'a'", b" if ", b"lambda: ", b"*", b"\\N{"),
)
EXPRESSION = Fuzzed(read_expression, lambda: EXPRESSIONS, (UserError,), PARTS)
OWN = {"format": 1}


def read_stored(data: bytes) -> object:
    """As a cell's own record, its job.json, its error.json, and what a program and the launcher print."""
    text = data.decode("utf-8", "replace")
    found = parsed(data)
    program = answers.parse(f"DMLTRAIN_CHECK {text}\n", 1), forecast.parse(f"DMLTRAIN_MEASURE {text}\n")
    with contextlib.suppress(UserError):
        job = job_record.parse("job.json", data)
        return state(OWN, found, job, found), state(OWN, OWN, job, {}), program, launch.placed(text)
    return program, launch.placed(text)


STORED = Fuzzed(
    read_stored,
    lambda: [
        b'{"format": 1, "exit_code": 0, "seconds": 2.5, "error": "why", "cause": null, "cause_log": "worker-0.log"}',
        b'[{"error": null, "options": {"lr": 0.1}, "role": "worker", "host": "h1"}]',
    ],
    (),
    (b"null", b"[", b"{", b'"seconds": ', b"1e999", b"NaN", b"true", b'"exit_code": '),
)


HEAD_OF_SECTIONS = "program: x\ngrid: {devices: [1], kv-store: [a]}\n"
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
WORDS_OF_SECTIONS = (
    *(b"columns", b"plots", b"published", b"errors", b"where", b"correct", b"value", b"devices", b"- ", b"{", b"}"),
    *(b"[", b"]", b": ", b"null", b"true", b"1e308", b"-1", b".nan", b"&a ", b"*a", b"**", b"/ 0", b"speed_up"),
)


def read_sections(data: bytes) -> object:
    return presentation(made.experiment(data.decode("utf-8", "replace")))


def sections() -> list[bytes]:
    return [f"{HEAD_OF_SECTIONS}{section}".encode() for section in SECTIONS]


PRESENTATION = Fuzzed(read_sections, sections, (UserError,), WORDS_OF_SECTIONS)


@pytest.mark.parametrize("part", parts())
@pytest.mark.parametrize(
    "name", ["FILE", "EXPRESSION", "STORED", pytest.param("PRESENTATION", marks=pytest.mark.thorough)]
)
def test_files_and_expressions(name, part):
    survive(f"tests.experiment.test_fuzz:{name}", part)
