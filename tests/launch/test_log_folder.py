"""The folder of a job's logs: what a new run finds there, a record that is whole, its format, and the journal."""

import json
import os
import pickle
import shutil
import subprocess
import sys
import typing
import zlib
from pathlib import Path
from typing import Any

import pytest

from dmltrain_launch import LaunchError
from dmltrain_launch.agent.ending import write_last_line
from dmltrain_launch.agent.events import Exited
from dmltrain_launch.clusters import AllOptions
from dmltrain_launch.clusters.queue import Inside, Submitted
from dmltrain_launch.commands import jobs, submit, visit
from dmltrain_launch.commands.recorded import Launcher
from dmltrain_launch.commands.show import Record
from dmltrain_launch.job.host import Host
from dmltrain_launch.job.job import Job
from dmltrain_launch.run import journal
from dmltrain_launch.run.journal import HEAD, JOURNAL, Beginning, Entry, Journal
from dmltrain_launch.run.supervisor.event import Lost, Tick
from dmltrain_launch.terminal.log_folder import QUEUED, LogFolder
from dmltrain_launch.terminal.record import FORMAT, read_record
from tests.launch.conftest import ROOT


class AtOnce:
    """A queue whose jobs start before it answers."""

    def submit(self, job: Inside) -> Submitted:
        LogFolder(job.path).unlock()
        return Submitted({"number": 7}, "in the queue")


def test_a_submitted_job_that_starts_at_once_has_its_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(submit, "queue_of", lambda name: AtOnce())
    said: list[str] = []
    job = Inside(AllOptions(launcher="slurm"), (), "it", tmp_path / "logs")
    assert submit.submit(job, said.append) == 0 and said[0] == "job it is in the queue"
    assert json.loads((tmp_path / "logs" / QUEUED).read_text())["number"] == 7


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


def test_two_jobs_do_not_share_a_log_folder(tmp_path):
    holder = LogFolder(tmp_path)
    with pytest.raises(LaunchError, match="another job is writing its logs here"):
        LogFolder(holder.path)


def test_a_folder_that_is_of_another_program_or_cannot_be_made_is_named(tmp_path):
    precious = tmp_path / "worker-0.log"
    precious.write_text("precious")
    wrong = {tmp_path: "has worker-0.log but no job.json", precious / "logs": "Not a directory"}
    for logs, said in wrong.items():
        with pytest.raises(LaunchError, match=f"{logs}.*{said}") as caught:
            LogFolder(logs)
        assert caught.value.code == 2
    assert [*tmp_path.iterdir()] == [precious] and precious.read_text() == "precious"


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


# -- what 0.4 wrote is read, what a later dmltrain writes is refused with the fix --------------------------------------

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
    job = visit.read(folder, AllOptions())
    assert (job.cluster, job.mark, job.ended) == ("local", "true-20261122-031852-df4089cd42eea156", True)
    (host,) = job.hosts
    assert host == Host("localhost", "127.0.0.1", "/home/user/venv/bin/python", where=f"{folder}/job.json: hosts[0]")
    assert job.launcher == Launcher("login", 4056) and job.options == AllOptions()
    assert Record(folder).ended
    assert " ".join(map(str, Record(folder).sources)) == "scheduler-0 server-0 server-1 worker-0 worker-1"
    (row,) = jobs.find_jobs(folder.parent)
    assert (row.state, row.record["exit_code"]) == (jobs.ENDED, 0)


def test_a_newer_format_is_refused_with_the_version_that_reads_it(folder):
    newer = {**json.loads(GOLDEN.read_text()), "format": FORMAT + 1, "versions": {"dmltrain": "9.1"}}
    (folder / "job.json").write_text(json.dumps(newer))
    for read in (lambda path: visit.read(path, AllOptions()), lambda path: Record(path).ended):
        with pytest.raises(LaunchError, match=rf"format {FORMAT + 1}, .* formats 0 to {FORMAT}: use dmltrain 9\.1"):
            read(folder)
    assert jobs.find_jobs(folder.parent)[0].state == jobs.UNREADABLE


@pytest.mark.parametrize("text", ["", "[]", "{", '{"format": "1"}', '{"format": -1}'])
def test_what_is_no_record_is_refused(folder, text):
    (folder / "job.json").write_text(text)
    with pytest.raises(LaunchError, match="job.json"):
        read_record(folder / "job.json")


# -- the journal of a launcher: what is read of it, and what is refused ------------------------------------------------

HOST = Host("h", "10.0.0.1")
JOB = Job("job", "mark", ("true",), 1, 1, "/")
BEGINNING = Beginning(AllOptions(), JOB, (HOST,), (HOST,), "logs/job", 5.0, key="00")
ENTRIES = [Entry(1.0, Tick()), Entry(2.0, Exited("h", 3, -9), "h", 7), Entry(3.0, Lost("h", "was lost"))]


@pytest.fixture
def written(tmp_path):
    made = Journal(tmp_path, "1.0")
    made.begin(BEGINNING)
    made.add(ENTRIES[0])
    made.attach(4)
    for each in ENTRIES[1:]:
        made.add(each)
    return tmp_path


def test_what_was_written_is_read_again(written):
    story, size = journal.read(written, "1.0")
    assert (story.beginning, story.entries, story.lease) == (BEGINNING, ENTRIES, 4)
    path = written / JOURNAL
    assert path.stat().st_size == size and path.stat().st_mode & 0o777 == 0o600
    with path.open("ab") as file:
        file.write(HEAD.pack(100, 0) + b"a part")
    assert journal.read(written, "1.0") == (story, size)
    Journal(written, "1.0", size).add(ENTRIES[0])
    assert journal.read(written, "1.0")[0].entries == [*ENTRIES, ENTRIES[0]]


def test_of_another_version(written):
    with pytest.raises(LaunchError, match=r"'1\.0', and this is 2\.0"):
        journal.read(written, "2.0")


def pickled(kind: Any, known: dict[str, list[str]]) -> dict[str, list[str]]:
    """All classes of the package in values of this type, by their names, with their fields."""
    for part in typing.get_args(kind):
        pickled(part, known)
    if getattr(kind, "__module__", "").startswith("dmltrain_launch") and isinstance(kind, type):
        name = f"{kind.__module__}.{kind.__qualname__}"
        if name not in known:
            hints = typing.get_type_hints(kind)
            known[name] = list(hints)
            for part in (*hints.values(), *kind.__subclasses__()):
                pickled(part, known)
    return known


def test_the_format_rises_with_what_is_pickled():
    """If this fails, a launcher cannot read an earlier one's journal: raise FORMAT, and write the new sum here."""
    found = pickled(Entry, pickled(Beginning, {}))
    assert len(found) > 30
    assert (journal.FORMAT, zlib.crc32(json.dumps(found, sort_keys=True).encode())) == (5, 3845297319)


def test_of_another_format(written):
    content = (written / JOURNAL).read_bytes()
    (written / JOURNAL).write_bytes(content.replace(b'"format": 5', b'"format": 4', 1))
    with pytest.raises(LaunchError, match="has format 4, expected 5"):
        journal.read(written, "1.0")


@pytest.mark.parametrize("content", [b"", b"{}\n", b"nonsense", b'{"format": 5, "dmltrain": "1.0"}\n'])
def test_what_is_not_a_journal(tmp_path, content):
    (tmp_path / JOURNAL).write_bytes(content)
    with pytest.raises(LaunchError, match="is not the journal of a launcher"):
        journal.read(tmp_path, "1.0")


def test_that_others_can_write_it_or_that_it_is_a_link_is_refused(written):
    (written / JOURNAL).chmod(0o666)
    with pytest.raises(LaunchError, match="by another user"):
        journal.read(written, "1.0")
    (written / JOURNAL).chmod(0o600)
    os.rename(written / JOURNAL, written / "elsewhere")
    os.symlink("elsewhere", written / JOURNAL)
    with pytest.raises(LaunchError, match=r"launcher\.journal"):
        journal.read(written, "1.0")


class Code:
    def __reduce__(self):
        return os.mkdir, ("made by the journal",)


def test_no_code_of_a_journal_is_run(written, monkeypatch):
    monkeypatch.chdir(written)
    data = pickle.dumps(Code())
    with (written / JOURNAL).open("ab") as file:
        file.write(HEAD.pack(len(data), zlib.crc32(data)) + data)
    with pytest.raises(LaunchError, match="is not the journal of a launcher"):
        journal.read(written, "1.0")
    assert not (written / "made by the journal").exists()


def test_every_frame_of_a_log_has_a_mark(tmp_path):
    kept = journal.Kept(tmp_path)
    kept.put(2, 9, 100)
    kept.put(0, 4, 50)
    again = journal.Kept(tmp_path)
    assert [again.frame(task) for task in (0, 1, 2, 3)] == [4, 0, 9, 0]
    assert again.size([0, 2]) == 100 and again.size([1]) == 0


def test_the_folder_of_a_job_that_goes_on_without_a_launcher_is_refused(tmp_path):
    for name in (journal.JOURNAL, "job.json"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(LaunchError, match=f"dmltrain job attach {tmp_path}, .*dmltrain job kill {tmp_path}, or"):
        LogFolder(tmp_path)
    assert (tmp_path / "job.json").exists()
    (tmp_path / journal.JOURNAL).unlink()
    LogFolder(tmp_path)
    assert (tmp_path / "previous-1/job.json").exists()


@pytest.mark.parametrize("write", ["agent", "launcher"])
@pytest.mark.parametrize("kind", ["link", "hard link", "pipe", "foreign"])
def test_what_somebody_has_put_in_the_place_of_a_log_is_not_written(tmp_path, write, kind):
    precious, log = tmp_path / "precious", tmp_path / {"agent": "agent-h1.log", "launcher": "launcher.log"}[write]
    precious.write_text("precious")
    if kind == "foreign":
        if os.geteuid():
            pytest.skip("a file of another user needs root")
        log.write_text("")
        os.chown(log, 2002, 2002)
    else:
        {"link": log.symlink_to, "hard link": log.hardlink_to, "pipe": lambda to: os.mkfifo(log)}[kind](precious)
    if write == "agent":
        write_last_line(str(tmp_path), "h1", "lost", [])
    else:
        leave = "import os, sys; from pathlib import Path; from dmltrain_launch.run.background import into_background"
        run = f"{leave}; into_background(Path(sys.argv[1])); os.write(2, b'said')"
        done = subprocess.run([sys.executable, "-c", run, tmp_path], cwd=ROOT, capture_output=True)
        assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert precious.read_text() == "precious" and (kind != "foreign" or not log.read_text())


def test_an_agents_last_line_is_added_to_its_own_log(tmp_path):
    for why in ("one", "two"):
        write_last_line(str(tmp_path), "h1", why, [7])
    text = (tmp_path / "agent-h1.log").read_text()
    assert "): one; ended the job\n1 process left on 1 host: pid 7 on h1\n" in text and "): two;" in text
