"""The results of experiments in logs/reference: complete, and shown in the documentation as they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/measured-experiments.md"
FOLDERS = sorted(path.parent for path in (ROOT / "logs/reference").glob("*/experiment.json"))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_every_cell_is_done(folder):
    count = len(json.loads((folder / "experiment.json").read_text())["cells"])
    ended = [json.loads(path.read_text())["exit_code"] for path in folder.glob("cells/*/job.json")]
    assert ended == [0] * count


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_documentation_shows_the_tables(folder):
    shown = set(PAGE.read_text().splitlines())
    rows = [line for line in (folder / "table.md").read_text().splitlines() if line.startswith("|")]
    assert rows
    assert [row for row in rows if row not in shown] == []
