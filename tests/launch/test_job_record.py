"""job.json has a format: what 0.4 wrote is read, what a later dmltrain writes is refused with the fix."""

import json
import shutil
from pathlib import Path

import pytest

from launch import LaunchError
from launch.commands import jobs, visit
from launch.commands.recorded import Launcher
from launch.commands.show import Record
from launch.job.host import Host
from launch.job.options import Options
from launch.terminal.record import FORMAT, read_record

GOLDEN = Path(__file__).parents[1] / "golden" / "job-0.4.json"  # of `-n 2 -s 2 true`; paths and host name changed


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The logs of a job that 0.4 ran."""
    folder = tmp_path / "old"
    folder.mkdir()
    shutil.copy(GOLDEN, folder / "job.json")
    return folder


def test_the_record_of_an_old_job_is_read_by_whatever_reads_records(folder):
    assert "format" not in json.loads(GOLDEN.read_text())
    job = visit.read(folder, Options())
    assert (job.cluster, job.mark, job.ended) == ("local", "true-20261122-031852-df4089cd42eea156", True)
    (host,) = job.hosts
    assert host == Host("localhost", "127.0.0.1", "/home/user/venv/bin/python", where=f"{folder}/job.json: hosts[0]")
    assert job.launcher == Launcher("login", 4056) and job.options == Options()
    assert Record(folder).ended
    assert " ".join(map(str, Record(folder).sources)) == "scheduler-0 server-0 server-1 worker-0 worker-1"
    (row,) = jobs.find_jobs(folder.parent)
    assert (row.state, row.record["exit_code"]) == (jobs.ENDED, 0)


def test_a_newer_format_is_refused_with_the_version_that_reads_it(folder):
    newer = {**json.loads(GOLDEN.read_text()), "format": FORMAT + 1, "versions": {"dmltrain": "9.1"}}
    (folder / "job.json").write_text(json.dumps(newer))
    for read in (lambda path: visit.read(path, Options()), lambda path: Record(path).ended):
        with pytest.raises(LaunchError, match=rf"format {FORMAT + 1}, .* formats 0 to {FORMAT}: use dmltrain 9\.1"):
            read(folder)
    assert jobs.find_jobs(folder.parent)[0].state == jobs.UNREADABLE


@pytest.mark.parametrize("text", ["", "[]", "{", '{"format": "1"}', '{"format": -1}'])
def test_what_is_no_record_is_refused(folder, text):
    (folder / "job.json").write_text(text)
    with pytest.raises(LaunchError, match="job.json"):
        read_record(folder / "job.json")
