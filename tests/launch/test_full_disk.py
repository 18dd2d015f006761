"""The disk of the log folder is full: a job with --detach goes on, and all of its output is in its logs once there is
room again."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dmltrain_launch.run import journal
from dmltrain_launch.run.keeper import FullDiskRetry
from dmltrain_launch.run.stream import Stream
from dmltrain_launch.terminal.log_folder import LogFolder
from dmltrain_launch.terminal.output import Output, Silent


class Full:
    """A descriptor that has no room until it is asked whether to try again for the second time."""

    def __init__(self, descriptor: int):
        self.descriptor, self.real = descriptor, os.dup(descriptor)
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, descriptor)
        os.close(full)
        self.asked: list[OSError] = []

    def __call__(self, error: OSError) -> bool:
        self.asked.append(error)
        if len(self.asked) == 2:
            os.dup2(self.real, self.descriptor)
            os.close(self.real)
        return True


def test_output_waits_for_room(tmp_path):
    folder = LogFolder(tmp_path / "job")
    output = Output(folder, ["worker-0"], Silent())
    output.write(0, b"before\n")
    folder.retry = room = Full(output._files[0])
    output.write(0, b"after\n")
    assert (tmp_path / "job/worker-0.log").read_bytes() == b"before\nafter\n" and len(room.asked) == 2
    output.close()


def test_the_journal_waits_for_room(tmp_path):
    room = None
    made = journal.Journal(tmp_path, "1.0", retry=lambda error: room(error))
    room = Full(made._descriptor)
    made.attach(7)
    assert len(room.asked) == 2 and (tmp_path / journal.JOURNAL).stat().st_size


@pytest.mark.parametrize("is_waiting", [True, False])
def test_it_waits_for_a_full_disk_only_and_no_longer_once_it_is_given_up(is_waiting):
    said: list[str] = []
    room = FullDiskRetry(said.append)
    full, broken = OSError(28, "No space left on device"), OSError(5, "Input/output error")
    if not is_waiting:
        assert not room(full) and not said
        return
    room.wait()
    assert room(full) and room(full) and not room(broken)
    assert len(said) == 1 and "No space left" in said[0]
    room.give_up()
    assert not room(full)


def test_what_is_not_in_the_log_never_counts_as_kept():
    stream = Stream()
    for _ in range(2):
        stream.begin()
        stream.end()
    assert stream.kept == 2
    stream.begin()
    stream.stop()
    stream.end()
    stream.begin()
    stream.end()
    assert stream.kept == 2


@pytest.mark.parametrize(
    ("there", "size", "again", "found"),
    [
        (b"abc", 3, [b"de"], b"abcde"),
        (b"abc", 1, [b"bc", b"de"], b"abcde"),
        (b"abc", 1, [b"b", b"c", b"de"], b"abcde"),
        (b"abc", 1, [b"bcde"], b"abcde"),
        (b"abc", 0, [b"x", b"y"], b"abcxy"),  # the mark was lost, and what comes is new
        (b"abcabc", 0, [b"abd"], b"abcabcd"),
        (b"abc", 99, [b"de"], b"abcde"),
        (b"", 0, [b"abc"], b"abc"),
    ],
)
def test_a_log_never_shrinks_and_what_comes_again_is_not_doubled(tmp_path, there, size, again, found):
    log = tmp_path / "job/worker-0.log"
    log.parent.mkdir()
    log.write_bytes(there)
    output = Output(LogFolder(tmp_path / "job", again=True), ["worker-0"], Silent())
    output.expect_again(0, size)
    for data in again:
        before = log.read_bytes()
        output.write(0, data)
        assert log.read_bytes().startswith(before)
    assert log.read_bytes() == found
    output.close()


SCRIPT = """set -e
mkdir disk; mount -t tmpfs -o size=200k none disk
"$1" -m dmltrain_launch.cli --launcher local --detach -n 1 -s 1 --log-dir disk/job sh -c '
  [ $DMLC_ROLE = worker ] || exec sleep 300
  for line in $(seq 20); do head -c 20000 /dev/zero | tr "\\\\0" x; echo; done
  echo the end; while [ ! -e go ]; do sleep 0.1; done; exit 3'
while [ "$(stat -f -c %a disk)" != 0 ]; do sleep 0.1; done
touch go
mount -o remount,size=8m disk
"$1" -c 'from dmltrain_launch.cli import job_main; job_main()' attach disk/job --quiet || echo "code $?"
cp disk/job/worker-0.log .
"""


def test_a_job_goes_on_while_the_disk_of_its_logs_is_full(tmp_path):
    if os.geteuid() or not shutil.which("unshare"):
        pytest.skip("a disk of its own needs root")
    command = ["unshare", "-m", "sh", "-c", SCRIPT, "sh", sys.executable]
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": root, "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert "code 3" in done.stdout, done
    log = (tmp_path / "worker-0.log").read_text().splitlines()
    assert [len(line) for line in log[:20]] == [20000] * 20 and log[20:] == ["the end"]
