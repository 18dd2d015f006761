"""--plan: other programs learn from it which process runs where, and how to reach the host."""

import json

import pytest

from launch import LaunchError
from launch.cli import launch
from launch.command_line.table import OPTIONS


def test_where_each_process_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text("a slots=1\nb slots=1 hostname=10.0.0.2 user=me port=2222\n")
    assert launch(["--plan", "-n", "2", "-s", "2", "-H", "hosts", "train.py"]) == 0
    said = capsys.readouterr()
    rows = json.loads(said.out)
    placed = [f"{row['role']}-{row['rank']} {row['host']}" for row in rows]
    assert placed == ["scheduler-0 a", "server-0 a", "server-1 b", "worker-0 a", "worker-1 b"] and said.err == ""
    first, *_, last = rows
    assert (first["hostname"], first["user"], first["port"]) == ("a", "", 0)
    assert (last["hostname"], last["user"], last["port"]) == ("10.0.0.2", "me", 2222)
    assert not (tmp_path / "logs").exists()
    (tmp_path / "hosts").write_text("a slots=one\n")
    with pytest.raises(LaunchError, match="hosts:1") as wrong:
        launch(["--plan", "-n", "1", "-H", "hosts", "train.py"])
    assert wrong.value.code == 2 and capsys.readouterr().out == ""


def test_no_two_options_have_one_name():
    names = [name for option in OPTIONS for name in option.names]
    assert len(names) == len(set(names))
