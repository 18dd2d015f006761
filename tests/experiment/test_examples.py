"""The files in examples/experiments: all options are valid, trials stay small, published figures are as printed."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dmltrain.experiment import cli
from dmltrain.experiment.plan.cell import Cell, cells
from dmltrain.experiment.plan.definition import Experiment
from dmltrain.experiment.plan.file import load
from dmltrain.experiment.results import presentation
from dmltrain.experiment.results.measured import is_number
from dmltrain.options import FLAGS
from tests.forked_job import forked, run_forked

FOLDER = Path(__file__).parents[2] / "examples/experiments"
FILES = sorted(FOLDER.glob("*.yaml"))
OF_THE_TEST_BED = sorted([*FOLDER.glob("*/*.yaml"), *FOLDER.glob("ssp-*.yaml")])
TODAY = FOLDER / "cpu/cifar10-today.yaml"  # which has a trial, too
MOST_SMALL = 80  # cells of all trials together


def made(path: Path, small: bool) -> tuple[Experiment, tuple[Cell, ...]]:
    experiment = load(path, small)
    return experiment, cells(experiment, FLAGS).all


def shown(name: str, number: int) -> list[dict[str, object]]:
    """The rows of a file's published table: what the table shows, by column."""
    rows = presentation(load(FOLDER / name)).published[number].rows
    return [{key: figure.value for key, figure in row.figures.items()} for row in rows]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_says_what_it_is_and_shows_published_figures(path):
    experiment, found = made(path, small=False)
    trial, small = made(path, small=True)
    assert experiment.title and experiment.description and experiment.source.startswith("https://")
    assert 0 < len(small) <= len(found) or len(found) == 1
    assert trial.small and trial.time_limit
    for view in (presentation(experiment), presentation(trial)):
        assert view.columns and view.plots
        assert all(result.source.startswith("https://") for result in view.published)


@pytest.mark.parametrize("path", OF_THE_TEST_BED, ids=lambda path: path.name)
def test_a_file_for_two_cores_or_the_test_bed_has_cells_columns_and_plots(path, capsys):
    assert cli.main([str(path), "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith(f"{len(made(path, small=False)[1])} cells of ")
    view = presentation(load(path))
    assert view.columns and view.plots


@pytest.mark.parametrize("small", [False, True])
def test_each_staleness_has_its_kvstore(small):
    stores = {None: "local", 0: "dist_sync", "infinity": "dist_async"}
    for cell in made(FOLDER / "ssp-speed.yaml", small)[1]:
        assert cell.servers == (0 if cell.workers == 1 else cell.workers)
        store = cell.words[cell.words.index("--kv-store") + 1]
        assert store == stores.get(cell.settings.get("staleness"), "dist_ssp"), cell.id
        assert (store == "dist_ssp") == ("--staleness" in cell.words), cell.id


def test_all_trials_together_have_few_cells():
    assert sum(len(made(path, small=True)[1]) for path in FILES) <= MOST_SMALL


@pytest.mark.parametrize("program", ["train_cifar10.py", "train_imagenet.py", "train_mnist.py"])
def test_the_program_takes_the_options_of_every_cell(program, tmp_path):
    files = [path for path in (*FILES, TODAY) if Path(load(path).program).name == program]
    of = [(path, small) for path in files for small in (False, True)]
    lists = [list(cell.words) for path, small in of for cell in made(path, small)[1]]
    assert lists, program
    (tmp_path / "words.json").write_text(json.dumps(lists))
    environment = {**os.environ, "DMLTRAIN_CHECK": str(tmp_path / "words.json")}
    code, out = run_forked(tmp_path, FOLDER.parent / program, environment=environment)
    assert code == 0, out
    answers = json.loads(out.partition("DMLTRAIN_CHECK ")[2].splitlines()[0])
    assert len(answers) == len(lists)
    assert [(words, answer["error"]) for words, answer in zip(lists, answers, strict=True) if answer["error"]] == []


# -- published figures ------------------------------------------------------------------------------------------------


def test_errors_of_the_keras_profile_are_corrected():
    first, second = shown("resnet50-profile.yaml", 0), shown("resnet50-profile.yaml", 1)
    (last,) = [row for row in second if row["backend"] == "mxnet" and row["GPUs"] == 16]
    assert last["seconds_per_epoch"] == 30.4 and last["samples_per_second"] == pytest.approx(1973.56 * 5 / 6)
    for row in (*first, *second):  # 50,000 images in the seconds of an epoch
        assert row["samples_per_second"] * row["seconds_per_epoch"] == pytest.approx(50_000, rel=0.002)
        assert row["total_seconds"] == pytest.approx(row["seconds_per_epoch"] * row["epochs"], rel=0.001)
    marked = presentation(load(FOLDER / "resnet50-profile.yaml")).published
    assert all("sum over all GPUs" in row.figures["device_memory"].error for one in marked for row in one.rows)
    assert [len(one.rows) for one in marked] == [5, 10]


def test_published_speeds_agree_with_their_seconds_and_counts_of_gpus():
    for number in (0, 1):
        for row in shown("inception-v3-profile.yaml", number):
            assert row["total_seconds"] == pytest.approx(row["seconds_per_epoch"] * row["epochs"], rel=0.001)
    rows = [row for row in shown("multi-gpu.yaml", 0) if "samples_per_second" in row]
    assert len(rows) == 21
    for row in rows:
        assert row["samples_per_second"] * row["seconds_per_epoch"] == pytest.approx(50_000, rel=0.06), row
    assert sum(1 for row in rows if row["devices"] == 0) == 1
    rows = shown("mxnet-scaling.yaml", 0)
    assert len(rows) == 27
    assert all(row["GPUs"] == row["machines"] * row["GPUs of each"] for row in rows)
    for network in ("alexnet", "inception-v3", "resnet"):
        rates = [row["samples_per_second"] for row in rows if row["network"] == network]
        assert rates == sorted(rates) and all(map(is_number, rates))


def test_published_accuracies_are_fractions_of_the_logs():
    """MXNet's authors trained on 46 batches of 256 or 23 of 512 an epoch and worker, of 60,000 / 5 images."""
    rows = [row for row in shown("cifar10-inception.yaml", 0) if row["kv_store"] == "dist_sync"]
    assert len(rows) == 16
    for row in rows:
        correct = row["train_accuracy"] * 46 * 256 * 5  # of all workers
        assert abs(correct - round(correct)) < 46 * 256 * 5 * 6e-7 + 0.01


@pytest.mark.thorough
def test_a_trial_learns(tmp_path):
    """Its program is forked with torch, which six processes need not import each."""
    (tmp_path / "files").mkdir()
    file = shutil.copy(FOLDER / "ilsvrc12-inception.yaml", tmp_path / "files")
    python, *words = forked(FOLDER.parent / "train_imagenet.py")
    stand_in = f"import os, sys\nos.execv({python!r}, {[python, *words]} + sys.argv[1:])\n"
    (tmp_path / "train_imagenet.py").write_text(stand_in)
    words = "--small --only kv_store=dist_sync --set network=mlp"
    command = [sys.executable, "-m", "dmltrain.experiment.cli", file, *words.split()]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=600)
    folder = tmp_path / "logs/experiments/ilsvrc12-inception-small"
    (row,) = [row for row in json.loads((folder / "results.json").read_text())["rows"] if row["status"] == "done"]
    assert row["values"]["last_accuracy"]["mean"] > 0.5  # ten classes
    table = (folder / "table.md").read_text()
    assert "num-epochs 3 (whole: " in table and "22783.1" in table  # what is small, and a published time


ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/measured-experiments.md"
FOLDERS = sorted(path.parent for path in (ROOT / "logs/reference").glob("*/experiment.json"))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_every_cell_of_a_reference_is_done_and_the_documentation_shows_its_table(folder):
    count = len(json.loads((folder / "experiment.json").read_text())["cells"])
    ended = [json.loads(path.read_text())["exit_code"] for path in folder.glob("cells/*/job.json")]
    assert ended == [0] * count
    shown = set(PAGE.read_text().splitlines())
    rows = [line for line in (folder / "table.md").read_text().splitlines() if line.startswith("|")]
    assert rows and [row for row in rows if row not in shown] == []
