"""The folder of a job's logs: what a new run finds there, and a record that is whole at every moment."""

import json

import pytest

from launch import LaunchError
from launch.terminal.log_folder import LogFolder


def test_nothing_of_an_earlier_run_is_taken_for_the_new_ones(tmp_path):
    """Neither its logs nor the request to end it: a new run that finds that would not start again after a fault."""
    earlier = {"job.json", "worker-0.log", "server-12.log", "scheduler-0.log", "agent-h1.log", "usage.csv", "killed"}
    for name in earlier:
        (tmp_path / name).write_text("old")
    (tmp_path / "restart-1").mkdir()
    kept = {"checkpoint-0003", "notes.log", "killed-by-whom", "my-usage.csv"}
    for name in kept:
        (tmp_path / name).write_text("mine")
    new = LogFolder(tmp_path)
    assert not new.killed
    aside = {path.name for path in (tmp_path / "previous-1").iterdir()}
    assert aside == {*earlier, "restart-1"}
    assert {path.name for path in tmp_path.iterdir()} == {"previous-1", *kept}
    (tmp_path / "killed").touch()
    assert new.killed


def test_a_folder_of_another_program_is_refused(tmp_path):
    (tmp_path / "worker-0.log").write_text("theirs")
    with pytest.raises(LaunchError, match="worker-0.log but no job.json"):
        LogFolder(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["worker-0.log"]


def test_readers_always_see_a_complete_record(tmp_path):
    folder, path = LogFolder(tmp_path), tmp_path / "job.json"
    folder.write_record({"job": "one"})
    with path.open() as reader:
        folder.write_record({"job": "two"})
        assert json.load(reader) == {"job": "one"}, "the file that was opened does not change"
    assert json.loads(path.read_text()) == {"job": "two"}
    with pytest.raises(TypeError):
        folder.write_record({"job": "three", "and": object()})
    assert json.loads(path.read_text()) == {"job": "two"}, "what cannot be written whole replaces nothing"


def test_a_record_that_cannot_be_written_leaves_no_draft(tmp_path):
    folder = LogFolder(tmp_path)
    (tmp_path / "job.json").mkdir()
    with pytest.raises(LaunchError, match="cannot write to .*job.json: "):
        folder.write_record({"job": "one"})
    assert [path.name for path in tmp_path.iterdir()] == ["job.json"]
