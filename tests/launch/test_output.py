"""From log lines to rows, and from chunks to lines."""

import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from launch import LaunchError
from launch.terminal.live import duration, row
from launch.terminal.log_folder import LogFolder
from launch.terminal.output import ENDING_BYTES, WAITING_BYTES, Output, tag, write_all
from launch.terminal.progress import Progress
from tests.waiting import wait_for

PREFIX = b"2026-11-20 12:00:00,123 Node[0] "


class Kept:
    """A display that keeps what it is shown, once it is let."""

    def __init__(self):
        self.shown: list[tuple[int, bytes]] = []
        self.let = threading.Event()
        self.let.set()

    def show(self, task, lines):
        self.let.wait()
        self.shown.append((task, lines))

    def close(self):
        self.shown.append((-1, b"closed"))


def test_chunks_become_whole_lines(tmp_path):
    display = Kept()
    output = Output(LogFolder(tmp_path), ["worker-0", "worker-1"], display)
    output.write(0, b"one\ntw")
    output.write(1, b"other\n")
    output.write(0, b"o\nthree\nfo")
    output.write(0, b"ur")
    output.close()
    assert display.shown == [(0, b"one\n"), (1, b"other\n"), (0, b"two\nthree\n"), (0, b"four\n"), (-1, b"closed")]
    assert (tmp_path / "worker-0.log").read_bytes() == b"one\ntwo\nthree\nfour"
    assert output.last_lines(0, 2) == ["three", "four"]


def test_a_replacement_continues_the_log_of_the_process_before_it(tmp_path):
    display = Kept()
    output = Output(LogFolder(tmp_path), ["worker-0", "worker-1"], display)
    output.write(1, b"one\ncu")
    output.add(1)
    output.add(2)
    output.write(2, b"two\n")
    output.write(1, b"t off\n")
    output.write(3, b"three\n")
    assert [output.last_lines(task) for task in range(4)] == [[], ["one", "cut off"], ["two"], ["three"]]
    output.close()
    assert display.shown == [(1, b"one\n"), (1, b"two\n"), (1, b"cut off\n"), (1, b"three\n"), (-1, b"closed")]
    assert (tmp_path / "worker-1.log").read_bytes() == b"one\ncu\ntwo\nt off\nthree\n"


def test_a_slow_display_holds_the_writer_until_the_job_ends(tmp_path):
    display = Kept()
    display.let.clear()
    output = Output(LogFolder(tmp_path), ["worker-0"], display)
    chunk, count = b"x" * 99_999 + b"\n", 2 * ENDING_BYTES // 100_000
    written, stood = [], []

    def write() -> None:
        for _ in range(count):
            output.write(0, chunk)
            written.append(1)

    def stands_still() -> bool:
        stood.append(len(written))
        return len(stood) > 100 and len(set(stood[-100:])) == 1 and len(written) >= WAITING_BYTES / 100_000

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    wait_for(stands_still, "the writer waits")
    assert WAITING_BYTES / 100_000 <= len(written) < count / 10
    output.hurry()
    thread.join()  # writes do not block any more
    display.let.set()
    output.close(120.0)
    shown = sum(len(lines) for _, lines in display.shown)
    assert ENDING_BYTES <= shown < ENDING_BYTES + 300_000, "what fits is shown"
    assert (tmp_path / "worker-0.log").stat().st_size == count * 100_000, "the log has all"
    (tmp_path / "worker-0.log").unlink()


class FullDisk(LogFolder):
    """A folder whose files take nothing."""

    def open_log(self, name: str) -> int:
        return os.open("/dev/full", os.O_WRONLY)


def test_a_log_that_cannot_be_written_is_reported_once(tmp_path):
    display = Kept()
    output = Output(FullDisk(tmp_path), ["worker-0"], display)
    with pytest.raises(LaunchError, match="worker-0.log: No space left on device; use another --log-dir"):
        output.write(0, b"one\n")
    output.write(0, b"two\n")
    output.close()
    assert display.shown[:-1] == [(0, b"one\n"), (0, b"two\n")]


@pytest.mark.parametrize("others", [0, 1100], ids=["few files open", "more than 1024"])
def test_a_non_blocking_terminal_gets_all_lines(others):
    """Another program may have made a shared terminal non-blocking. Waiting for it works with any number of files."""
    more = [os.open(os.devnull, os.O_RDONLY) for _ in range(others)]
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    data = bytes(range(256)) * 4096  # a pipe holds 64 KiB
    with ThreadPoolExecutor(1) as pool:
        writer = pool.submit(write_all, writing, data)
        received = b""
        while len(received) < len(data):
            received += os.read(reading, 1 << 16)
        writer.result()
    assert received == data
    os.close(reading)
    with pytest.raises(BrokenPipeError):
        write_all(writing, data)
    for descriptor in (writing, *more):
        os.close(descriptor)


def test_tags_and_durations():
    assert tag("worker-0", None) == b"[worker-0] "
    assert tag("worker-0", 1) == b"\x1b[32m[worker-0] \x1b[0m"
    assert [duration(seconds) for seconds in (0.4, 61, 3723)] == ["0:00", "1:01", "1:02:03"]


def test_progress_of_our_lines():
    progress = Progress()
    assert row(progress, 0.0) == ("-", "-", "-", "-", "-")
    assert not progress.read(PREFIX + b"Training epochs 2 to 3, 100 batches each", 10.0)
    assert progress.read(PREFIX + b"Epoch[2] Batch [50]\tSpeed: 1733.12 samples/sec\taccuracy=0.312500", 20.0)
    assert row(progress, 20.0) == ("2/3", "50/100", "1733.1", "0.3125", "0:30")
    assert not progress.read(PREFIX + b"Epoch[2] Time cost=19.000", 30.0)
    assert not progress.read(PREFIX + b"Epoch[2] Validation-accuracy=0.500000", 30.0)
    assert row(progress, 30.0) == ("2/3", "100/100", "1733.1", "0.5000", "0:20")
    progress.read(PREFIX + b"Epoch[3] Batch [100]\tSpeed: 1.5e+03 samples/sec\taccuracy=nan", 50.0)
    assert row(progress, 50.0) == ("3/3", "100/100", "1500.0", "nan", "0:00")


SPEED = b"Speed: 1000.50 samples/sec"


@pytest.mark.parametrize(
    "line",
    [
        b"INFO:root:Epoch[0] Batch [20]\t%s\tTrain-accuracy=0.25" % SPEED,
        b"INFO:root:Epoch[0] Batch [0-20]\t%s\taccuracy=0.250000" % SPEED,
        b"2015-11-20 12:00:00,123 Node[1] Epoch[0] Batch [20]\t%s\tTrain-accuracy=0.250000" % SPEED,
    ],
)
def test_progress_of_mxnets_lines(line):
    progress = Progress()
    for other in (b"", b"Epoch[x] Batch [1]", b"Epoch[1] Batch [1]\tSpeed: e samples/sec", b"\xff\0"):
        progress.read(other, 0.0)
        assert row(progress, 1.0)[2:] == ("-", "-", "-"), "no speed, no accuracy, no time left"
    assert progress.read(line, 1.0)
    assert row(progress, 2.0) == ("0", "20", "1000.5", "0.2500", "-"), "no plan, no time left"


def test_a_line_of_the_launcher_is_written_in_one_piece():
    """The output of processes is written by another thread."""
    program = "from launch.ending import say\nsay('first')\nsay('second')"
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, its:
        subprocess.run([sys.executable, "-c", program], stderr=its, check=True, timeout=60)
        assert [ours.recv(100), ours.recv(100)] == [b"first\n", b"second\n"]
