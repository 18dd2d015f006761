"""Sentences and the caption: what they say, and what they do not say without knowing it."""

import re

import pytest

from dmltrain.experiment.plan.file import parse
from dmltrain.experiment.results.column import ColumnNames
from dmltrain.experiment.results.fault import Fault
from dmltrain.experiment.results.sentence import sentences
from dmltrain.report.summaries.summary import COLUMNS
from tests.experiment.results import made

ACCURACY = COLUMNS["last_accuracy"].heading

NAMES = ColumnNames(frozenset({"devices"}))


def rates(**by_devices):
    """Logs of two epochs with these samples per second and accuracies."""

    def log(settings):
        rate = by_devices[f"d{settings['devices']}"]
        rate = rate[settings["seed"]] if isinstance(rate, list) else rate
        if rate is None:
            return None
        one = {"Time cost": 10, "Speed": rate, "Validation-accuracy": rate / 1000}
        return made.epochs(one, one, devices=settings["devices"])

    return log


FILE = "title: T\nprogram: x.py\ngrid: {devices: [1, 2, 4]}\n"


@pytest.mark.parametrize(
    "sentence, log, said",
    [
        ("fastest", rates(d1=200, d2=340, d4=300), "fastest is devices 2 with 340 samples/s: 1.7 .* (devices 1)"),
        (
            "{fastest: seconds_per_epoch}",
            lambda settings: made.epochs(*[{"Time cost": {1: 30, 2: 10, 4: 15}[settings["devices"]]}] * 2),
            "fastest is devices 2 with 10 s/epoch: 3.0 .* (devices 1)",
        ),
        (
            "most-accurate",
            rates(d1=200, d2=350, d4=300),
            f"accurate is devices 2 with {ACCURACY} 0.3500; .* (devices 1) has {ACCURACY} 0.2000",
        ),
    ],
)
def test_the_best_and_how_much_better_than_the_worst_it_is(tmp_path, sentence, log, said):
    (found,) = made.outcome_of(tmp_path, FILE + f"sentences: [{sentence}]\n", log).sentences
    assert re.search(said.replace("(", r"\(").replace(")", r"\)"), found)


def test_a_lead_within_the_spread_is_none(tmp_path):
    text = FILE + "seeds: [0, 1]\nsentences: [fastest]\n"
    found = made.outcome_of(tmp_path / "a", text, rates(d1=[100, 110], d2=[300, 320], d4=[305, 325]))
    assert found.sentences[0].endswith(" The lead of devices 4 over devices 2 is within the spread.")
    found = made.outcome_of(tmp_path / "b", text, rates(d1=[100, 110], d2=[300, 301], d4=[305, 306]))
    assert "spread" not in found.sentences[0]


@pytest.mark.parametrize("log", [rates(d1=None, d2=None, d4=5), rates(d1=None, d2=None, d4=None)])
def test_one_row_is_not_the_fastest(tmp_path, log):
    assert made.outcome_of(tmp_path, FILE + "sentences: [fastest]\n", log).sentences == ()


@pytest.mark.parametrize(
    "given, part",
    [
        *(("fastest", "expected a list"), (["fastst"], "did you mean fastest?")),
        ([{"fastest": "sample_per_second"}], "did you mean samples_per_second?"),
        *(([{"fastest": 5}], "not 5"), ([5], "expected one of")),
        ([{"fastest": "devices", "most-accurate": "devices"}], "expected one of"),
    ],
)
def test_mistakes_in_sentences(given, part):
    with pytest.raises(Fault, match=r"^sentences") as fault:
        sentences(given, NAMES)
    assert part in str(fault.value)


# -- the caption ------------------------------------------------------------------------------------------------------


def test_the_caption_of_cells_that_were_measured_once(tmp_path):
    assert made.outcome_of(tmp_path, FILE).caption == (
        "3 cells, each measured once.",
        "Times and rates are means over the epochs of a run, without the first.",
        "Machine: AMD EPYC, 2 cores.",
        "Versions: dmltrain 0.4.0, torch 2.13.0+cpu, Python 3.11.7.",
        "Measured on 2026-11-22.",
    )


def test_the_caption_of_several_seeds_emulated_computing_and_a_speed_up(tmp_path):
    text = f"{FILE}seeds: [0, 1]\ncolumns: [devices, speed_up]\n"
    text += "options: {emulate-step: 0.05, stragglers: 0.05 * devices}\n"
    caption = made.outcome_of(tmp_path, text).caption
    assert caption[0].startswith("6 cells: 3 settings with the seeds 0, 1; mean ± sample standard deviation")
    assert "Computing was emulated: each step takes at least 0.05 s (--emulate-step)." in caption
    assert "Computing was emulated: stragglers 0.05 or 0.1 or 0.2 (--stragglers)." in caption
    assert "Speed-up: samples/s divided by those of devices 1 with otherwise the same settings and seed." in caption
    text = FILE + 'options: {emulate-step: "0.05 if devices > 1 else null"}\n'
    assert any("emulated in 2 of 3 cells: " in sentence for sentence in made.outcome_of(tmp_path / "2", text).caption)


def test_what_was_made_small_or_set_on_the_command_line_is_said(tmp_path):
    text = FILE + "small: {grid: {devices: [1]}}\n"
    found = made.outcome_of(tmp_path, parse(text.encode(), tmp_path / "x.yaml", make_small=True))
    assert found.small == "1 cell (whole: 3); devices 1 (whole: 1 or 2 or 4)"
    assert "Made small: 1 cell (whole: 3); devices 1 (whole: 1 or 2 or 4)." in found.caption
    found = made.outcome_of(tmp_path / "set", parse(FILE.encode(), tmp_path / "x.yaml", words=["wd=0.1"]))
    assert "Set on the command line: wd 0.1 (in the file: not given)." in found.caption


def test_the_only_epoch_of_a_run_is_not_left_out(tmp_path):
    caption = made.outcome_of(tmp_path, FILE, lambda settings: made.epochs({"Time cost": "2.5"})).caption
    assert any(sentence.endswith("without the first, unless it is the only one.") for sentence in caption)


def test_machines_that_differ_have_a_column(tmp_path):
    def log(settings):
        return made.epochs({}, machine=f"CPU {settings['devices']}, 2 cores")

    found = made.outcome_of(tmp_path, FILE, log)
    assert found.columns[-1].name == "machine"
    assert found.lines[2].values["machine"].mean == "CPU 4, 2 cores"
    assert not any("Machine:" in sentence for sentence in found.caption)
