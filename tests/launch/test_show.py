"""--logs: every line once, tagged, in the order of time, and on until the job ends."""

import contextlib
import json
import os
import resource
import shlex
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dmltrain_launch import LaunchError
from dmltrain_launch.commands.log_choice import Source, find, selected
from dmltrain_launch.commands.show import show
from dmltrain_launch.terminal.live import duration, row
from dmltrain_launch.terminal.log_folder import LogFolder
from dmltrain_launch.terminal.output import ENDING_BYTES, WAITING_BYTES, Output, tag, write_all
from dmltrain_launch.terminal.progress import Progress
from tests.copied_tree import search_path
from tests.waiting import wait_for


def stamp(second: float) -> str:
    return f"2026-11-20 12:00:{int(second):02d},{round(second % 1 * 1000):03d}"


def make(folder: Path, logs: dict[str, bytes], **record: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in logs.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
    facts = {"mark": "x", "launched_from": {"pid": 1}, "started": "2026", "ended": "2026", "processes": []}
    (folder / "job.json").write_text(json.dumps({**facts, **record}))
    return folder


def shown(folder: Path, selection: str = "", coloured: bool = False, **more) -> bytes:
    """What is printed for a folder, to a file."""
    out = folder.parent / "shown"
    with out.open("wb") as file:
        assert show(str(folder), selection, False, file.fileno(), coloured, **more) == ""
    return out.read_bytes()


def test_lines_are_merged_by_their_times(tmp_path):
    logs = {
        "worker-0.log": f"hello\n{stamp(1)} w0 one\n  more of one\n{stamp(4)} w0 two\nno newline".encode(),
        "worker-10.log": f"{stamp(2)} w10\n{stamp(1)} clock set back\n".encode(),
        "server-0.log": f"{stamp(1)} s0\n{stamp(3)} s0 \xff\udcff\n".encode("utf-8", "surrogateescape"),
        "agent-h1.log": f"{stamp(5)[:19]} agent\n".encode(),
        "scheduler-0.log": b"",
        "notes.log": b"not of the job\n",
        "previous-1/worker-0.log": b"of an earlier run\n",
    }
    make(tmp_path / "job", logs)
    assert shown(tmp_path / "job") == (
        f"[worker-0] hello\n"
        f"[server-0] {stamp(1)} s0\n"
        f"[worker-0] {stamp(1)} w0 one\n"
        f"[worker-0]   more of one\n"
        f"[worker-10] {stamp(2)} w10\n"
        f"[worker-10] {stamp(1)} clock set back\n"
        f"[server-0] {stamp(3)} s0 \xff\udcff\n"
        f"[worker-0] {stamp(4)} w0 two\n"
        f"[worker-0] no newline\n"
        f"[agent-h1] {stamp(5)[:19]} agent\n"
    ).encode("utf-8", "surrogateescape")


def test_restarts_come_after_the_run_before(tmp_path):
    logs = {
        "worker-0.log": f"start\n{stamp(1)} first\n".encode(),
        "restart-1/worker-0.log": f"start\n{stamp(9)} second\n".encode(),
        "restart-10/worker-0.log": b"third\n",
        "restart-2/worker-0.log": b"other\n",
    }
    make(tmp_path / "job", logs)
    assert shown(tmp_path / "job").decode().splitlines() == [
        "[worker-0] start",
        f"[worker-0] {stamp(1)} first",
        "[restart-1/worker-0] start",
        f"[restart-1/worker-0] {stamp(9)} second",
        "[restart-2/worker-0] other",
        "[restart-10/worker-0] third",
    ]
    coloured = shown(tmp_path / "job", coloured=True)
    assert b"\x1b[36m[worker-0] \x1b[0mstart\n" in coloured and b"\x1b[36m[restart-1/worker-0] \x1b[0m" in coloured


def test_long_lines_and_large_logs_take_little_memory(tmp_path):
    size = 40_000_000
    make(tmp_path / "job", {})
    with (tmp_path / "job/worker-0.log").open("wb") as file:
        file.truncate(size)  # one line of zeros
    text = "".join(f"{stamp(n % 60)} line {n}\n" for n in range(100_000))
    (tmp_path / "job/worker-1.log").write_text(text)
    code = f"""
import resource
from dmltrain_launch.commands.show import show
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with open({str(tmp_path / "out")!r}, "wb") as out:
    show({str(tmp_path / "job")!r}, "", False, out.fileno())
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    used = int(subprocess.check_output([sys.executable, "-c", code], env=dict(os.environ, PYTHONPATH=search_path())))
    assert used < 8_000, "KiB"
    data = (tmp_path / "out").read_bytes()
    assert data.count(b"\0") == size
    assert data.count(b"[worker-1] ") == 100_000


THERE = [Source("worker", n) for n in range(5)] + [Source("server", n) for n in (0, 2)]
THERE += [Source("scheduler", 0), Source("agent", "h1"), Source("agent", "h-2")]


@pytest.mark.parametrize(
    "text, expected",
    [
        ("", THERE),
        ("worker", THERE[:5]),
        ("worker:3", THERE[3:4]),
        ("worker:1-2,scheduler", [*THERE[1:3], THERE[7]]),
        ("worker:3-99, server:2", [*THERE[3:5], THERE[6]]),
        ("agent:h-2", THERE[9:]),
        ("scheduler:0", THERE[7:8]),
    ],
)
def test_selections(text, expected):
    wanted = selected(text, THERE)
    assert [source for source in THERE if wanted(source)] == expected


@pytest.mark.parametrize(
    "text", ["wrker", "worker:", "worker:9", "worker:x", "worker:-1", "worker,", "server:1", "a:b"]
)
def test_an_empty_selection_lists_the_logs(text):
    with pytest.raises(LaunchError) as caught:
        selected(text, THERE)
    assert str(caught.value).endswith("the logs are scheduler:0, server:0, server:2, worker:0-4, agent:h-2, agent:h1")
    assert f"--show {text}: no log of " in str(caught.value)


def test_a_job_is_a_name_or_a_folder(tmp_path):
    root = tmp_path / "logs"
    job = make(root / "fit", {})
    assert find("fit", root) == job
    assert find(str(job), root) == job
    old = tmp_path / "old"
    old.mkdir()
    (old / "worker-0.log").write_bytes(b"")
    assert find(str(old), root) == old, "without job.json"


def test_an_unknown_job_lists_the_newest(tmp_path):
    root = tmp_path / "logs"
    with pytest.raises(LaunchError, match="no job 'fit' in .*logs/.* no jobs in"):
        find("fit", root)
    for number in range(12):
        record = make(root / f"job{number}", {}) / "job.json"
        os.utime(record, (number, number))
    (root / "reference").mkdir()
    for wrong in ("fit", "reference", ""):
        with pytest.raises(LaunchError, match="known jobs: job11, job10, .*, job2 and 2 more") as caught:
            find(wrong, root)
        assert caught.value.code == 2 and "reference," not in str(caught.value)


class Following:
    """`show` with follow in a thread, into a pipe."""

    def __init__(self, folder: Path, selection: str = "", patience: float = 600.0):
        self.reading, writing = os.pipe()
        self.data, self.said = b"", None
        os.set_blocking(self.reading, False)

        def run() -> None:
            self.said = show(str(folder), selection, True, writing, patience=patience)
            os.close(writing)

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()

    def has(self, text: bytes) -> bool:
        with contextlib.suppress(BlockingIOError):
            self.data += os.read(self.reading, 1 << 20)
        return text in self.data

    def wait_for(self, text: bytes) -> None:
        wait_for(lambda: self.has(text), f"{text!r} in {self.data!r}")

    def end(self) -> bytes:
        self.thread.join()
        while more := os.read(self.reading, 1 << 20):
            self.data += more
        return self.data


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def test_following_a_job_to_its_end(tmp_path):
    folder = make(tmp_path / "job", {"worker-0.log": b"one\ntw"}, ended=None)
    following = Following(folder, "worker")
    following.wait_for(b"[worker-0] one\n")
    append(folder / "worker-0.log", b"o\n")
    following.wait_for(b"[worker-0] two\n")
    make(folder, {"worker-1.log": b"late\n", "server-0.log": b"not wanted\n"}, ended=None)
    following.wait_for(b"[worker-1] late\n")
    make(folder, {"restart-1/worker-0.log": b"again\n"}, ended=None, mark="of the restart")
    following.wait_for(b"[restart-1/worker-0] again\n")
    append(folder / "worker-1.log", b"last words")
    make(folder, {}, ended="2026", mark="of the restart")
    lines = b"[worker-0] one\n[worker-0] two\n[worker-1] late\n[restart-1/worker-0] again\n[worker-1] last words\n"
    assert following.end() == lines
    assert following.said == ""


def test_following_costs_next_to_nothing(tmp_path):
    folder = make(tmp_path / "job", {f"worker-{rank}.log": b"one\n" for rank in range(64)}, ended=None)
    following = Following(folder)
    following.wait_for(b"[worker-63] one\n")
    began, cpu = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF)
    time.sleep(1.5)
    now, elapsed = resource.getrusage(resource.RUSAGE_SELF), time.monotonic() - began
    used = now.ru_utime + now.ru_stime - cpu.ru_utime - cpu.ru_stime
    make(folder, {})
    following.end()
    assert used / elapsed < 0.1, "of a core: no busy loop"


def test_following_a_job_whose_folder_another_takes(tmp_path):
    folder = make(tmp_path / "job", {"worker-0.log": b"one\n"}, ended=None)
    following = Following(folder)
    following.wait_for(b"[worker-0] one\n")
    new = LogFolder(folder)
    new.write_record({"mark": "y", "launched_from": {"pid": 2}, "started": "2026", "ended": None, "processes": []})
    assert b"three" not in following.end()


def test_a_job_is_followed_until_its_launcher_has_died(tmp_path):
    """However quiet it is while its launcher lives."""
    holder = LogFolder(tmp_path / "job")
    folder = make(tmp_path / "job", {"worker-0.log": b"one\n"}, ended=None)
    alone = Following(make(tmp_path / "alone", {"worker-0.log": b"one\n"}, ended=None), patience=0.5)
    following = Following(folder, patience=0.1)
    following.wait_for(b"one\n")
    alone.end()  # at its patience's end, five times that of the other
    assert alone.said == f"the launcher of {tmp_path}/alone died before it recorded the job's end"
    append(folder / "worker-0.log", b"two\n")
    following.wait_for(b"two\n")
    holder.write_record({"mark": "x", "launched_from": {"pid": 1}, "started": "2026", "ended": "2026"})
    following.end()
    assert following.said == ""


def test_a_reader_that_goes_away(tmp_path):
    make(tmp_path / "job", {"worker-0.log": b"line\n" * 1_000_000})
    code = f"from dmltrain_launch.commands.show import show; print(show({str(tmp_path / 'job')!r}, '', False, 1) == '')"
    command = f"{shlex.quote(sys.executable)} -c {code!r} 2>{tmp_path}/err | head -1"
    out = subprocess.check_output(["bash", "-c", command], env=dict(os.environ, PYTHONPATH=search_path()))
    assert out == b"[worker-0] line\n"
    assert b"show" not in (tmp_path / "err").read_bytes()


def test_read_and_write_errors_are_reported(tmp_path):
    make(tmp_path / "job", {"worker-0.log": b"line\n"})
    problem = "cannot show the logs of .*job: .*No space left"
    with open("/dev/full", "wb") as full, pytest.raises(LaunchError, match=problem):
        show(str(tmp_path / "job"), "", False, full.fileno())
    (tmp_path / "job/worker-1.log").mkdir()
    assert b"[worker-1] (left out: it is no regular file)\n" in shown(tmp_path / "job")
    (tmp_path / "job/restart-1").write_text("no folder")
    (tmp_path / "job/job.json").write_text("{")
    with pytest.raises(LaunchError, match="cannot read .*job.json: "):
        shown(tmp_path / "job", "worker:0")


# -- from log lines to rows, and from chunks to lines ------------------------------------------------------------------

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


DIGITS = b"9" * 5000
LONG = b"Epoch[1] " + b"a" * 60_000
ODD = [
    b"Epoch[%s] Batch [1]\t%s" % (DIGITS, SPEED),
    b"Epoch[1] Batch [%s]\t%s" % (DIGITS, SPEED),
    b"Epoch[1] Batch [1]\tSpeed: %s samples/sec" % DIGITS,
    b"Training epochs 0 to %s, 10 batches each" % (b"9" * 400),
    b"Epoch[1] Time cost=%s" % DIGITS,
    b"Epoch[1] Batch [1]\t%s\taccuracy=%s" % (SPEED, DIGITS),
    b"Epoch[1] " * 7000,
    LONG,
]


@pytest.mark.parametrize("line", ODD)
def test_an_odd_line_is_a_line_like_others_and_read_in_no_time(line):
    progress, began = Progress(), time.process_time()
    progress.read(line, 0.0)
    assert progress.seconds_left(1.0) is None and progress.plan is None
    assert time.process_time() - began < 1.0
    assert progress.read(b"Epoch[3] Batch [20]\t%s" % SPEED, 1.0) and progress.epoch == 3


def test_what_is_no_regular_file_is_left_out_and_said(tmp_path, monkeypatch):
    (tmp_path / "worker-0.log").write_text("one\n")
    os.mkfifo(tmp_path / "worker-1.log")
    (tmp_path / "worker-2.log").symlink_to("/dev/zero")
    (tmp_path / "worker-3.log").symlink_to("worker-3.log")
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as other:
        other.bind("worker-4.log")  # a long path would not do
        text = shown(tmp_path)
    assert b"[worker-0] one\n" in text
    assert text.count(b"(left out: it is no regular file)\n") == 4 and b"[worker-2] (left out" in text


def test_a_line_of_the_launcher_is_written_in_one_piece():
    """The output of processes is written by another thread."""
    program = "from dmltrain_launch.ending import say\nsay('first')\nsay('second')"
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, its:
        subprocess.run([sys.executable, "-c", program], stderr=its, check=True, timeout=60)
        assert [ours.recv(100), ours.recv(100)] == [b"first\n", b"second\n"]
