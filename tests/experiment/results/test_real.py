"""Cells that really ran: their logs and job.json give the table, the caption and the curves."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dmltrain.experiment.cell import cells
from dmltrain.experiment.result import DONE, ERROR, Result
from dmltrain.experiment.results import write
from tests.experiment.results import made

ROOT = Path(__file__).parents[3]
FILE = f"""\
title: Digits
program: {ROOT}/examples/train_digits.py
options: {{num-epochs: 2, num-examples: 256}}
grid: {{batch-size: [32, 0]}}
seeds: [0, 1]
columns: [network, batch-size, last_accuracy, seconds_per_epoch, machine]
plots: [curves]
"""

pytest.importorskip("torch", reason="torch is not installed: nothing is trained")


@pytest.mark.thorough
def test_the_table_of_real_cells(tmp_path):
    """The cells with a batch of 0 fail."""
    experiment = made.experiment(FILE)
    results = []
    for cell in cells(experiment, None).all:
        folder = tmp_path / "cells" / cell.id
        command = [sys.executable, "-m", "launch.cli", "--launcher", "local", "-n", "1", "-s", "0"]
        words = ["--log-dir", str(folder), experiment.program, *cell.words]
        done = subprocess.run([*command, *words], cwd=ROOT, capture_output=True, text=True)
        assert (done.returncode == 0) == (cell.settings["batch_size"] == 32), done.stderr
        status = DONE if done.returncode == 0 else ERROR
        results.append(Result(cell.id, cell.settings, cell.options, status, folder, "exit code 2"))
    assert write(tmp_path, experiment, results) == []
    found = json.loads((tmp_path / "results.json").read_text())
    good, failed = found["rows"]
    accuracy = good["values"]["last_accuracy"]
    assert accuracy["count"] == 2 and 0.1 < accuracy["mean"] <= 1 and accuracy["spread"] >= 0
    assert good["values"]["seconds_per_epoch"]["mean"] > 0 and good["values"]["machine"]["mean"]
    assert failed["status"] == "error" and failed["values"]["last_accuracy"]["count"] == 0
    assert "[error](cells/batch-size=0,seed=0/worker-0.log)" in (tmp_path / "table.md").read_text()
    assert any(sentence.startswith("Measured on 20") for sentence in found["caption"])
    assert any("torch 2." in sentence for sentence in found["caption"])
    assert "batch-size 32" not in (tmp_path / "plots/1-curves.svg").read_text(), "one row: nothing to tell apart"
