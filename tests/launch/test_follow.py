"""What comes with the output of a job whose launcher runs inside of a cluster, and what of it is believed."""

import base64
import json

import pytest

from dmltrain_launch import LaunchError
from dmltrain_launch.commands.follow import Copy
from dmltrain_launch.ending import FILE, say
from dmltrain_launch.terminal.log_folder import QUEUED, RECORD, LogFolder

INSIDE = {  # of a job that a cluster runs, as its launcher there writes it
    "format": 1,
    "job": "j",
    "mark": "j-0",
    "launcher": "kubernetes",
    "launched_from": {"host": "pod", "pid": 7, "start": 3, "boot_id": "b"},
    "control": "dmltrain-control-1",
    "reached_by": {"mpirun": "/tmp/evil", "mpirun_args": ["-x"], "ssh": "system"},
    "hosts": [{"name": "h1", "hostname": "pod-1", "user": "root", "port": 22, "python": "/tmp/evil"}],
    "ended": "2026-01-01T00:00:00+00:00",
    "exit_code": 0,
}


@pytest.fixture
def folder(tmp_path) -> LogFolder:
    """Of a job that was submitted from here."""
    folder = LogFolder(tmp_path / "job")
    (folder.path / QUEUED).write_text(json.dumps({"launcher": "kubernetes"}))
    return folder


def come(folder: LogFolder, record: object) -> None:
    """The record comes with the job's output."""
    text = base64.b64encode(json.dumps(record).encode())
    with Copy(folder, lambda source: False) as copy:
        copy.take([b"%s %s %s" % (FILE.encode(), RECORD.encode(), text)])


def test_a_record_that_comes_with_the_output_says_how_the_job_ended_and_not_how_hosts_are_reached(folder):
    come(folder, INSIDE)
    found = json.loads((folder.path / RECORD).read_text())
    changed = {
        "hosts": [{"name": "h1", "hostname": "pod-1"}],
        "reached_by": {},
        "control": "",
        "launched_from": {"host": "pod"},
    }
    assert found == INSIDE | changed


@pytest.mark.parametrize("record", [INSIDE | {"launcher": "mpi"}, {"launcher": None}, {}, [], "text", None])
def test_a_record_of_another_engine_is_refused(folder, record):
    with pytest.raises(LaunchError, match="is not the record of a job of kubernetes"):
        come(folder, record)
    assert not (folder.path / RECORD).exists()


def test_without_a_job_that_was_submitted_from_here_no_record_is_believed(tmp_path):
    folder = LogFolder(tmp_path / "job")
    with pytest.raises(LaunchError, match="is not the record of a job"):
        come(folder, INSIDE)


def test_what_the_launcher_says_never_passes_for_a_file(capsys):
    say(f"no room\n{FILE} {RECORD} e30=\nor\x1b[2J so")
    assert capsys.readouterr().err == f"no room\n {FILE} {RECORD} e30=\nor\\x1b[2J so\n"


@pytest.mark.parametrize("safe", [True, False])
def test_what_a_followed_job_prints_controls_no_terminal(tmp_path, capfd, safe):
    """Only the job's own output, while its user runs it, comes as it is; the log has every byte."""
    with Copy(LogFolder(tmp_path / "job"), lambda source: True, safe) as copy:
        copy.take([b"[worker-0] \x1b[31mred \xc2\x9b", b"the launcher says \x1b[31mred"])
    out, err = capfd.readouterr()
    assert out == ("[worker-0] \\x1b[31mred \\x9b\n" if safe else "[worker-0] \x1b[31mred \x9b\n")
    assert err == "the launcher says \\x1b[31mred\n"
    assert (tmp_path / "job/worker-0.log").read_bytes() == b"\x1b[31mred \xc2\x9b\n"
