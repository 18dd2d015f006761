"""DMLTRAIN_CHECK: a training program checks command lines without training."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dmltrain import env, option_check
from dmltrain.errors import UserError
from dmltrain.options import parse

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", ["train_digits.py", pytest.param("score.py", marks=pytest.mark.thorough)])
def test_a_program_answers_for_each_command_line(tmp_path, name):
    lines = [["--lr", "0.25"], ["--lr", "fast"], ["--num-layers", "9", "--network", "resnet"], ["--help"], ["--no"]]
    (tmp_path / "lines.json").write_text(json.dumps(lines))
    command = [sys.executable, ROOT / "examples" / name]
    variables = env.inherited(DMLTRAIN_CHECK=str(tmp_path / "lines.json"), PYTHONPATH=str(ROOT))
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=variables)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("DMLTRAIN_CHECK ") and done.stdout.count("\n") == 1
    good, *wrong = json.loads(done.stdout.removeprefix("DMLTRAIN_CHECK "))
    assert good["error"] is None and good["options"]["lr"] == 0.25 and good["distributed"] is False
    assert good["parameters"] > 1000
    expected = ("'fast' is not a number", "no resnet of 9 layers", "--help only prints", "unknown option --no")
    assert all(text in each["error"] for text, each in zip(expected, wrong, strict=True))
    assert [path.name for path in tmp_path.iterdir()] == ["lines.json"]


@pytest.mark.parametrize("content", ["{", "{}", "[1]", "[[1]]", "[" * 100_000])
def test_a_file_that_is_no_list_of_command_lines(tmp_path, content):
    file = tmp_path / "lines.json"
    file.write_text(content)
    with pytest.raises(UserError, match="JSON list of lists"):
        option_check.line(str(file), parse)
