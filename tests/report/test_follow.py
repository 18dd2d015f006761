"""dmltrain-parse --follow: rows as epochs end, reading only what was appended."""

import fcntl
import functools
import io
import json
import os
import pty
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dmltrain.report import reading, tail
from dmltrain.report.command_line import arguments
from dmltrain.report.follow import Follower, complete, follow
from dmltrain.report.live_job import LiveJob
from dmltrain.report.tail import Tail
from tests.copied_tree import search_path
from tests.forked_job import forked

ROOT = Path(__file__).resolve().parents[2]


def epoch(number: int, rank: int = 0) -> str:
    stamp = f"2026-11-20 12:00:{number:02d},123 Node[{rank}] Epoch[{number}]"
    values = [f"Train-accuracy=0.{number + 1}5{rank}000", "Time cost=1.500", f"Validation-accuracy=0.{number + 1}00000"]
    lines = "".join(f"{stamp} {value}\n" for value in [*values, "Speed=17"])
    return f"{stamp} Batch [0]\tSpeed: 17.50 samples/sec\taccuracy=0.125000\n{lines}"


def row(number: int, train: str) -> str:
    return f"| {number + 1:2d} | {train} | 0.{number + 1}00000 | 1.5 |\n"


HEADING = "| epoch | train-accuracy | val-accuracy | time |\n| --- | --- | --- | --- |\n"


class Job:
    """A log folder with the job.json and the lock of a launcher that runs."""

    def __init__(self, folder: Path, workers: int = 1) -> None:
        self.folder = folder
        folder.mkdir()
        self.record = {"started": "2026-11-20T12:00:00+00:00", "ended": None, "num_workers": workers}
        self.write()
        self._lock = os.open(folder, os.O_RDONLY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def write(self) -> None:
        (self.folder / "job.json").write_text(json.dumps(self.record))

    def append(self, text: str, name: str = "worker-0.log") -> None:
        (self.folder / name).parent.mkdir(exist_ok=True)
        with (self.folder / name).open("a") as file:
            file.write(text)

    def end(self) -> None:
        self.record["ended"] = "2026-11-20T12:01:00+00:00"
        self.write()

    def unlock(self) -> None:
        os.close(self._lock)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path / "job")


def followed(path: Path, steps: list[Callable[[], object]], *options: str) -> tuple[list[str], list[str], list[str]]:
    """Follow `path`; each step happens while the program sleeps. Returns the writes, messages and faults."""
    writes: list[str] = []
    said: list[str] = []
    left, now = iter(steps), [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds
        next(left, lambda: None)()

    given = arguments([str(path), "--follow", *options])
    done = follow(given, lambda one: writes.append(one) or [], lambda _, one: said.append(one), lambda: now[0], sleep)
    return writes, [*said, *done.notes], done.faults


# ---- reading what was appended --------------------------------------------------------------------------------------


def test_only_what_was_appended_is_read(job: Job) -> None:
    log = job.folder / "worker-0.log"
    log.write_text("")
    one, follower = Tail(str(log)), Follower(str(job.folder), LiveJob(str(job.folder)))
    assert not one.read() and not one.runs() and follower.poll() is None
    for number in range(50):
        with log.open("r+b") as file:
            file.write(b"." * log.stat().st_size)
        job.append(epoch(number % 9))
        assert one.read() and not one.read()
    assert [len(each.epochs) for each in one.runs()] == [9, 9, 9, 9, 9, 5], "each time from epoch 0 on is a run"
    assert follower.poll() is not None and follower.poll() is None, "it says nothing new until something is written"


@pytest.mark.parametrize("seed", range(5))
def test_pieces_give_what_the_whole_gives(tmp_path: Path, logs: Path, seed: int) -> None:
    draw = random.Random(seed)
    names = ["mxnet/mxnet_cifar10_incept_4", "mxnet/mxnet_R_mnist_1", "mxnet/mxnet_train-log-demo2"]
    texts = [(logs / f"{name}.log").read_bytes() for name in names]
    texts.append(b"epoch,step,loss,val_acc\n" + b"".join(b"%d,%d,0.5,\n,,,0.25\n" % (n // 9, n) for n in range(500)))
    for text in texts:
        log = tmp_path / "x.log"
        log.unlink(missing_ok=True)
        one, at = Tail(str(log)), 0
        while at < len(text):
            size = draw.choice([2, 50, 3000, 100_000])
            with log.open("ab") as file:
                file.write(text[at : at + size])
            at += size
            one.read()
            if draw.random() < 0.1:
                one.runs()  # does not change what comes
        one.end()
        assert list(one.runs()) == reading.scan(io.BytesIO(text))[0]


def test_a_file_that_became_shorter_or_another_one_is_read_from_its_start(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text(epoch(0) + epoch(1))
    one = Tail(str(log))
    one.read()
    log.write_text(epoch(5))
    assert one.read() and list(one.runs()[0].epochs) == [5]
    (tmp_path / "new.log").write_text(epoch(6) + epoch(7) + epoch(8))
    (tmp_path / "new.log").replace(log)
    assert one.read() and list(one.runs()[0].epochs) == [6, 7, 8]
    log.unlink()
    assert not one.read() and list(one.runs()[0].epochs) == [6, 7, 8], "what was read stays"


def test_memory_is_bounded_by_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    monkeypatch.setattr(tail, "CHUNK", 1000)
    log = tmp_path / "x.log"
    log.write_text("".join(map(epoch, range(100))))
    one = Tail(str(log))
    feed = one._feed
    monkeypatch.setattr(one, "_feed", lambda chunk: (sizes.append(len(chunk)), feed(chunk)))
    one.read()
    assert max(sizes) == 1000 and len(one.runs()[0].epochs) == 100


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le"])
@pytest.mark.parametrize("first", ["", "\n", "a\n"])
def test_the_encoding_is_seen_however_few_bytes_come_first(tmp_path: Path, encoding: str, first: str) -> None:
    text = (first + epoch(0) + epoch(1)).encode(encoding)
    one, log = Tail(str(tmp_path / "x.log")), (tmp_path / "x.log").open("wb", buffering=0)
    for at in range(100):
        log.write(text[at : at + 1])
        one.read()
    log.write(text[100:])
    one.read()
    assert list(one.runs()) == reading.scan(io.BytesIO(text))[0] and list(one.runs()[0].epochs) == [0, 1]


# ---- rows -----------------------------------------------------------------------------------------------------------


def test_an_epoch_is_complete_with_all_values_of_the_one_before_or_a_later_one() -> None:
    lines = (epoch(0) + epoch(1)).splitlines(keepends=True)

    def done(count: int) -> set[int]:
        return set(complete(reading.scan(io.BytesIO("".join(lines[:count]).encode()))[0][0]))

    assert [done(count) for count in (3, 5, 6, 9, 10)] == [set(), set(), {0}, {0}, {0, 1}]


def test_rows_appear_as_epochs_end(job: Job) -> None:
    def at_once() -> None:
        job.end()
        job.append(epoch(2)[:-9])  # the launcher writes the last lines after it says that the job has ended
        job.unlock()

    texts = (epoch(0), epoch(1)[:90], epoch(1)[90:])
    steps = [*(functools.partial(job.append, text) for text in texts), at_once]
    writes, notes, faults = followed(job.folder, steps)
    assert writes == [HEADING + row(0, "0.150000"), row(1, "0.250000"), row(2, "0.350000")]
    assert (notes, faults) == ([], [])


def test_a_row_waits_for_all_workers(tmp_path: Path) -> None:
    job = Job(tmp_path / "job", workers=2)
    steps = [
        lambda: job.append(epoch(0) + epoch(1)),
        lambda: job.append(epoch(0, 1), "worker-1.log"),
        lambda: job.append(epoch(1, 1), "worker-1.log"),
        lambda: (job.end(), job.unlock()),
    ]
    writes, _, faults = followed(job.folder, steps)
    assert writes == [HEADING + row(0, "0.150500"), row(1, "0.250500")] and not faults


def test_a_restart_is_followed(job: Job) -> None:
    steps = [
        lambda: job.append(epoch(0) + epoch(1) + epoch(2)),
        lambda: job.append(epoch(1, 1), "restart-1/worker-0.log"),
        lambda: job.append(epoch(2, 1), "restart-1/worker-0.log"),
        lambda: (job.end(), job.unlock()),
    ]
    writes, notes, faults = followed(job.folder, steps)
    second = [row(1, "0.251000"), row(2, "0.351000")]
    assert writes == [HEADING + row(0, "0.150000"), row(1, "0.250000"), row(2, "0.350000"), *second]
    assert len(notes) == 1 and "restart 1 " in notes[0] and not faults
    assert followed(job.folder / "restart-1", [])[0] == [HEADING + row(1, "0.251000"), row(2, "0.351000")]


@pytest.mark.parametrize(
    ("text", "end", "rows", "fault"),
    [
        (epoch(0), Job.unlock, [HEADING + row(0, "0.150000")], "lost its launcher"),
        (epoch(0), Job.end, [HEADING + row(0, "0.150000")], ""),  # on some file systems the folder stays locked:
        ("no\n", lambda job: (job.end(), job.unlock()), [], "without an epoch"),  # five seconds after its end
    ],
)
def test_the_end_of_a_job(job: Job, text: str, end: Callable, rows: list[str], fault: str) -> None:
    writes, _, faults = followed(job.folder, [lambda: job.append(text), lambda: end(job)])
    assert writes == rows
    assert fault in faults[0] if fault else not faults


@pytest.mark.parametrize("record", ["", "{", "[]", '{"started": 5, "num_workers": "x", "ended": {}}', "[" * 100_000])
def test_a_job_json_of_any_content(tmp_path: Path, record: str) -> None:
    (tmp_path / "job.json").write_text(record)
    (tmp_path / "worker-0.log").write_text(epoch(0))
    writes, _, _ = followed(tmp_path, [])
    assert writes == [HEADING + row(0, "0.150000")]


def test_columns_that_come_later_and_one_log_of_a_job(job: Job) -> None:
    job.append(epoch(0) + epoch(1) + "Epoch[1] Sent=17\n")
    job.append(epoch(0, 1), "worker-1.log")
    steps = [lambda: job.append(epoch(2) + "Epoch[2] Sent=18\n"), lambda: (job.end(), job.unlock())]
    log = job.folder / "worker-0.log"
    writes, _, faults = followed(log, steps, "--metric-names", "sent", "--format", "none")
    assert writes[0] == "epoch\tsent\ttime\n 1\t-\t1.5\n" and writes[-1] == " 3\t18.000000\t1.5\n" and not faults
    expected = "epoch,train-accuracy,val-accuracy,time\n1,0.15,0.1,1.5\n2,0.25,0.2,1.5\n3,0.35,0.3,1.5\n"
    assert "".join(followed(log, [], "--format", "csv")[0]) == expected


# ---- the program ----------------------------------------------------------------------------------------------------


@pytest.fixture
def program() -> Iterator[Callable[..., subprocess.Popen]]:
    started = []

    def start(*options: object, **more) -> subprocess.Popen:
        command = [sys.executable, "-m", "dmltrain.report.cli", "--follow", *map(str, options)]
        more = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **more}
        started.append(subprocess.Popen(command, env={**os.environ, "PYTHONPATH": search_path()}, **more))
        return started[-1]

    yield start
    for each in started:
        if each.poll() is None:
            each.kill()
        each.wait()


def test_ctrl_c_ends_it_as_does_a_reader_that_leaves(program: Callable, job: Job) -> None:
    job.append(epoch(0) + epoch(1))
    process = program(job.folder)
    lines = [process.stdout.readline() for _ in range(4)]
    assert "".join(lines) == HEADING + row(0, "0.150000") + row(1, "0.250000")
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert "Traceback" not in process.stderr.read()
    process = program(job.folder)
    job.append(epoch(0) + epoch(1))
    process.stdout.readline()
    process.stdout.close()
    job.append(epoch(2))
    assert process.wait(60) == 141


def test_in_a_terminal(program: Callable, job: Job) -> None:
    """The table is drawn again in place; at the end it is complete."""
    job.append(epoch(0) + epoch(1)[:90])
    ours, its = pty.openpty()
    process = program(job.folder, stdout=its, text=False)
    os.close(its)
    seen = bytearray()
    enough = threading.Event()

    def read() -> None:
        while True:
            try:
                seen.extend(os.read(ours, 4096))
            except OSError:  # the program has ended
                return
            if b"0.150000" in seen:
                enough.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert enough.wait(60)
    job.append(epoch(1)[90:])
    job.end()
    job.unlock()
    assert process.wait(60) == 0
    reader.join(60)
    os.close(ours)
    last = bytes(seen).rpartition(b"train-accuracy")[2].decode()
    assert "0.150000" in last and "0.250000" in last and "0.200000" in last
    assert b"\x1b[" in seen and b"Traceback" not in seen


@pytest.mark.thorough
def test_a_real_job(program: Callable, tmp_path: Path) -> None:
    """The table of a job, followed from before its first epoch, is the one that the launcher prints at its end."""
    folder = tmp_path / "job"
    launch = f"-m dmltrain_launch.cli --launcher local -n 1 -s 0 --log-dir {folder}"
    train = forked(ROOT / "examples/train_digits.py", "--kv-store", "local", "--num-epochs", "2")
    environment = {**os.environ, "PYTHONPATH": search_path(), "OMP_NUM_THREADS": "1"}
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen([sys.executable, *launch.split(), *train], env=environment, **output) as launcher:
        printed = ""
        while not (folder / "job.json").exists():
            line = launcher.stdout.readline()
            assert line, printed
            printed += line
        process = program(folder)
        printed += launcher.stdout.read()
        assert launcher.wait() == 0, printed
    shown, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (0, "")
    rows = [line for line in printed.splitlines() if line.startswith("|")]
    assert shown.splitlines() == rows and len(rows) == 4
