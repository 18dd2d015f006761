"""--logs: every line once, tagged, in the order of time, and on until the job ends."""

import contextlib
import json
import os
import resource
import shlex
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from launch import LaunchError
from launch.commands.log_choice import Source, find, selected
from launch.commands.show import show
from launch.terminal.log_folder import LogFolder
from tests.launch.conftest import ROOT
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
    make(
        tmp_path / "job",
        {
            "worker-0.log": f"hello\n{stamp(1)} w0 one\n  more of one\n{stamp(4)} w0 two\nno newline".encode(),
            "worker-10.log": f"{stamp(2)} w10\n{stamp(1)} clock set back\n".encode(),
            "server-0.log": f"{stamp(1)} s0\n{stamp(3)} s0 \xff\udcff\n".encode("utf-8", "surrogateescape"),
            "agent-h1.log": f"{stamp(5)[:19]} agent\n".encode(),
            "scheduler-0.log": b"",
            "notes.log": b"not of the job\n",
            "previous-1/worker-0.log": b"of an earlier run\n",
        },
    )
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
    make(
        tmp_path / "job",
        {
            "worker-0.log": f"start\n{stamp(1)} first\n".encode(),
            "restart-1/worker-0.log": f"start\n{stamp(9)} second\n".encode(),
            "restart-10/worker-0.log": b"third\n",
            "restart-2/worker-0.log": b"other\n",
        },
    )
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
from launch.commands.show import show
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with open({str(tmp_path / "out")!r}, "wb") as out:
    show({str(tmp_path / "job")!r}, "", False, out.fileno())
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    used = int(subprocess.check_output([sys.executable, "-c", code], env=dict(os.environ, PYTHONPATH=str(ROOT))))
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


NOBODY = ["wrker", "worker:", "worker:9", "worker:x", "worker:-1", "worker,", "server:1", "a:b"]


@pytest.mark.parametrize("text", NOBODY)
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
    assert following.end() == (
        b"[worker-0] one\n[worker-0] two\n[worker-1] late\n[restart-1/worker-0] again\n[worker-1] last words\n"
    )
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
    append(folder / "worker-0.log", b"two\n")
    following.wait_for(b"[worker-0] two\n")
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
    code = f"from launch.commands.show import show; print(show({str(tmp_path / 'job')!r}, '', False, 1) == '')"
    command = f"{shlex.quote(sys.executable)} -c {code!r} 2>{tmp_path}/err | head -1"
    out = subprocess.check_output(["bash", "-c", command], env=dict(os.environ, PYTHONPATH=str(ROOT)))
    assert out == b"[worker-0] line\n"
    assert b"show" not in (tmp_path / "err").read_bytes()


def test_read_and_write_errors_are_reported(tmp_path):
    make(tmp_path / "job", {"worker-0.log": b"line\n"})
    problem = "cannot show the logs of .*job: .*No space left"
    with open("/dev/full", "wb") as full, pytest.raises(LaunchError, match=problem):
        show(str(tmp_path / "job"), "", False, full.fileno())
    (tmp_path / "job/worker-1.log").mkdir()
    with pytest.raises(LaunchError, match="cannot show the logs of .*job: .*Is a directory"):
        shown(tmp_path / "job")
    (tmp_path / "job/restart-1").write_text("no folder")
    (tmp_path / "job/job.json").write_text("{")
    with pytest.raises(LaunchError, match="cannot read .*job.json: "):
        shown(tmp_path / "job", "worker:0")
