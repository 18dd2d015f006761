"""The journal of a launcher: what is read of it, and what is refused."""

import os
import pickle
import zlib

import pytest

from launch import LaunchError
from launch.agent.events import Exited
from launch.job.host import Host
from launch.job.job import Job
from launch.job.options import Options
from launch.run import journal
from launch.run.event import Lost, Tick
from launch.run.journal import HEAD, JOURNAL, Beginning, Entry, Journal

HOST = Host("h", "10.0.0.1")
BEGINNING = Beginning(Options(), Job("job", "mark", ("true",), 1, 1, "/"), (HOST,), (HOST,), "logs/job", 5.0, key="00")
ENTRIES = [Entry(1.0, Tick()), Entry(2.0, Exited("h", 3, -9), "h", (7, 0)), Entry(3.0, Lost("h", "was lost"))]


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


@pytest.mark.parametrize("content", [b"", b"{}\n", b"nonsense", b'{"format": 1, "dmltrain": "1.0"}\n'])
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
