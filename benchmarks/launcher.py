"""The launcher's cost: time to start a job, CPU and memory while a job runs, and the rate at which it receives output.
On the project's test bed (docs/testbed.md): real sshd, mpirun and Slurm, links of 1 Gbit/s. Starts are measured in
turns, one of each way after another. The allocation of Slurm is there before.

    sudo .venv/bin/python benchmarks/launcher.py [--starts-only] [--format json]

Hosts and launcher share this machine's cores, so the rates depend on what sshd and the printing processes use.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from report import CHECKOUT, PACKAGES, SEARCH_PATH, facts, fail, installed, show, spread

sys.path[:0] = PACKAGES

from tests.cluster import slurm  # noqa: E402
from tests.cluster.layout import LOGIN, Settings  # noqa: E402
from tests.cluster.testbed import Testbed, TestbedError, missing  # noqa: E402

HOSTS = 5
HOST_LIST = f"h[1-{HOSTS}]"
MB, MIB = 1e6, 2**20  # bytes
DEADLINE = 60.0  # s; far above the expected few seconds
EXCHANGES = 2000
# name -> the launcher's options, and the program that they need
WAYS = {
    "ssh": (["--launcher", "ssh", "--hosts", HOST_LIST], ""),
    "ssh system": (["--launcher", "ssh", "--ssh", "system", "--hosts", HOST_LIST], "ssh"),
    "Open MPI": (["--launcher", "mpi", "--mpirun", "mpirun.openmpi", "--hosts", HOST_LIST], "mpirun.openmpi"),
    "MPICH": (["--launcher", "mpi", "--mpirun", "mpirun.mpich", "--hosts", HOST_LIST], "mpirun.mpich"),
    "Slurm": (["--launcher", "slurm", "--slurm-job", "1"], ""),
    "local": (["--launcher", "local"], ""),
}
SIZES = {5: ["-n", "5", "-s", "0"], 64: ["-n", "32", "-s", "31"]}  # processes, the scheduler included
NOTE_TIME = ["sh", "-c", 'date +%s.%N > "$0/$DMLC_ROLE-$DMLC_TASK_ID"']
# A line per second and process, as long as those of a training
TRAINING_LINE = "2026-11-20 12:00:00,123 Node[0] Epoch[3] Batch [20]\tSpeed: 1733.12 samples/sec\taccuracy=0.312500"
LOG_ON = ["sh", "-c", f"while :; do echo '{TRAINING_LINE}'; sleep 1; done"]
PRINT_ON = ["sh", "-c", f"exec yes '{TRAINING_LINE}'"]


@dataclass(frozen=True)
class Bench:
    """The test bed, and a folder that all its hosts see."""

    testbed: Testbed
    folder: Path

    def start(self, way: str, logs: str, *arguments: str) -> subprocess.Popen:
        """Start a launcher on the login host; its output is discarded, its standard error goes to `logs`.err."""
        argv = [sys.executable, "-m", "dmltrain_launch.cli", *WAYS[way][0], "--log-dir", logs, *arguments]
        environment = {
            **os.environ,
            "PYTHONPATH": SEARCH_PATH,
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        }
        with (self.folder / f"{logs}.err").open("wb") as errors:
            return self.testbed.start(
                LOGIN,
                argv,
                cwd=self.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
            )

    def errors(self, logs: str) -> str:
        return (self.folder / f"{logs}.err").read_text(errors="replace")

    @contextmanager
    def running(self, way: str, logs: str, *arguments: str) -> Iterator[psutil.Process]:
        """Run a job while it is measured; yields its launcher once all processes have printed."""
        started = self.start(way, logs, *arguments)
        try:
            await_(lambda: logged(self.folder / logs) > 0, lambda: self.errors(logs))
            yield psutil.Process(self.testbed.command_pid(started))
        finally:
            started.send_signal(signal.SIGINT)
            started.wait(DEADLINE)
            shutil.rmtree(self.folder / logs, ignore_errors=True)


def await_(condition: Callable[[], object], why_not: Callable[[], str]) -> None:
    end = time.monotonic() + DEADLINE
    while not condition():
        if time.monotonic() > end:
            raise TestbedError(f"not within {DEADLINE:g} s: {why_not()}")
        time.sleep(0.02)


def logged(logs: Path) -> int:
    """Bytes in the logs of all workers; 0 while a worker has none."""
    sizes = [path.stat().st_size for path in logs.glob("worker-*.log")]
    return sum(sizes) if len(sizes) == HOSTS and all(sizes) else 0


def start_seconds(bench: Bench, way: str, size: int) -> dict[str, float]:
    """Seconds from the launcher's start to the start of the last process, and to the launcher's end."""
    places = bench.folder / "started"
    places.mkdir()
    began = time.time()
    started = bench.start(way, "logs", *SIZES[size], *NOTE_TIME, str(places))
    if started.wait(DEADLINE):
        raise TestbedError(f"{way}: {bench.errors('logs')}")
    ended = time.time()
    times = [float(path.read_text()) for path in places.iterdir()]
    if len(times) != size:
        raise TestbedError(f"{way}: {len(times)} of {size} processes ran")
    for folder in (places, bench.folder / "logs"):
        shutil.rmtree(folder)
    return {"to_the_last_process": max(times) - began, "whole_job": ended - began}


def cost(bench: Bench, way: str, seconds: float) -> dict[str, float]:
    """CPU and memory of the launcher while each of ten processes on five hosts logs a line per second."""
    with bench.running(way, "cost", "-n", str(HOSTS), "-s", str(HOSTS), *LOG_ON) as launcher:
        time.sleep(1.0)  # until the start is complete
        beside = launcher.children(recursive=True)  # ssh, mpirun
        before, began = cpu_seconds(launcher), time.monotonic()
        before_beside = sum(map(cpu_seconds, beside))
        time.sleep(seconds)
        took = time.monotonic() - began
        share, share_beside = cpu_seconds(launcher) - before, sum(map(cpu_seconds, beside)) - before_beside
        exchange = statistics.median(exchange_seconds() for _ in range(3))
        status = Path(f"/proc/{launcher.pid}/status").read_text()
        return {
            "cores": share / took,
            "exchanges_per_second": share / took / exchange,
            "memory_bytes": launcher.memory_info().rss,
            "most_memory_bytes": int(status.partition("VmHWM:")[2].split()[0]) * 1024,
            "cores_of_its_children": share_beside / took,
            "memory_bytes_of_its_children": sum(each.memory_info().rss for each in beside),
        }


def cpu_seconds(process: psutil.Process) -> float:
    """CPU time of the process's threads, in nanoseconds by the kernel; psutil's is in ticks of 10 ms."""
    found = 0
    for schedstat in Path(f"/proc/{process.pid}/task").glob("*/schedstat"):
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has just ended
            found += int(schedstat.read_text().split()[0])
    return found / 1e9


def exchange_seconds(count: int = EXCHANGES) -> float:
    """CPU time of an exchange on this machine: a thread writes a line of JSON into a pipe, another one answers it.

    The launcher's work while a job runs is of this kind, so its cost in exchanges differs little between machines.
    """
    line = json.dumps({"kind": "output", "of": "worker 0", "text": TRAINING_LINE}).encode() + b"\n"
    mine, its = socket.socketpair()

    def answer() -> None:
        with its, its.makefile("rb") as lines:
            for line in lines:
                its.sendall(json.dumps(json.loads(line)).encode() + b"\n")

    thread = threading.Thread(target=answer)
    thread.start()
    with mine, mine.makefile("rb") as lines:
        began = time.process_time()
        for _ in range(count):
            mine.sendall(line)
            json.loads(lines.readline())
        took = time.process_time() - began
        mine.shutdown(socket.SHUT_RDWR)
    thread.join()
    return took / count


def streaming(bench: Bench, way: str, seconds: float, *options: str) -> dict[str, float]:
    """Bytes per second into the logs while a worker on each host prints without a pause."""
    logs = bench.folder / "stream"
    with bench.running(way, "stream", "-n", str(HOSTS), "-s", "0", *options, *PRINT_ON) as launcher:
        time.sleep(0.5)
        before, began, cpu = logged(logs), time.monotonic(), cpu_seconds(launcher)
        time.sleep(seconds)
        bytes_, took = logged(logs) - before, time.monotonic() - began
        status = Path(f"/proc/{launcher.pid}/status").read_text()
        return {
            "bytes_per_second": bytes_ / took,
            "cores": (cpu_seconds(launcher) - cpu) / took,
            "most_memory_bytes": int(status.partition("VmHWM:")[2].split()[0]) * 1024,
        }


def starts(bench: Bench, ways: Sequence[str], repeats: int) -> dict[str, dict]:
    """What the starts of each way took, measured in turns."""
    turns: dict[str, dict[int, list]] = {way: {size: [] for size in SIZES} for way in ways}
    for turn in range(repeats):
        print(f"launcher.py: starts, turn {turn + 1} of {repeats}", file=sys.stderr)
        for size in SIZES:
            for way in ways:
                turns[way][size].append(start_seconds(bench, way, size))
    return {way: {str(size): spreads(found) for size, found in sizes.items()} for way, sizes in turns.items()}


def at_work(bench: Bench, way: str, seconds: float) -> dict[str, dict]:
    """What the launcher needs while a job runs on five hosts."""
    print(f"launcher.py: {way} at work", file=sys.stderr)
    return {
        "five_hosts_at_work": cost(bench, way, 3 * seconds),
        "streaming": streaming(bench, way, seconds, "--quiet"),
        "streaming_with_display": streaming(bench, way, seconds),
    }


def run(bench: Bench, ways: Sequence[str], repeats: int, seconds: float, starts_only: bool) -> dict[str, dict]:
    """All figures of each way to launch."""
    if "Slurm" in ways:
        started = slurm.Slurm(bench.testbed, bench.folder / "slurm")
        started.start()
        started.on(LOGIN, ["salloc", "--quiet", "--no-shell", f"--nodes={HOSTS}"])
    found: dict[str, dict] = {way: {"start_seconds": start} for way, start in starts(bench, ways, repeats).items()}
    for way in ways:
        if way != "local" and not starts_only:
            found[way] |= at_work(bench, way, seconds)
    return found


def lacking_for(way: str) -> str:
    """What this machine lacks for a way to launch; "" if nothing."""
    if way == "Slurm":
        return slurm.missing()
    program = WAYS[way][1]
    return "" if not program or shutil.which(program) else program


def spreads(turns: Sequence[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Median, minimum and maximum of each figure."""
    return {name: spread([turn[name] for turn in turns]) for name in turns[0]}


def table(result: dict) -> str:
    """The figures in Markdown, as in docs/performance.md."""
    lines = [
        "| | 5 processes start in | 64 processes start in | CPU, 5 hosts log | memory | log streaming |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for way, found in result["ways"].items():
        cells = [f"{found['start_seconds'][size]['to_the_last_process']['median']:.2f} s" for size in map(str, SIZES)]
        if "streaming" in found:
            work, rate = found["five_hosts_at_work"], found["streaming"]["bytes_per_second"]
            cells += [
                f"{100 * work['cores']:.1f} % of a core",
                f"{work['most_memory_bytes'] / MIB:.0f} MiB",
                f"{rate / MB:.0f} MB/s",
            ]
        lines.append(f"| {way} | {' | '.join(cells + ['-'] * (5 - len(cells)))} |")
    return "\n".join(lines)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], epilog="Needs root, as the test bed does.")
    parser.add_argument("--format", choices=("table", "json"), default="table")
    parser.add_argument("--repeats", type=int, default=5, help="starts of each kind (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=5.0, help="of streaming; a third of the time at work")
    parser.add_argument("--starts-only", action="store_true", help="leave out the launcher's cost while a job runs")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="default: all")
    arguments = parser.parse_args(argv)
    if arguments.repeats < 1 or not 0 < arguments.seconds < math.inf:
        parser.error("--repeats is at least 1, --seconds more than 0")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print it; 2 when this machine cannot have a test bed."""
    arguments = parse(argv)
    lacking = missing()
    if lacking:
        return fail("launcher.py", f"the test bed needs {lacking}", 2)
    ways = [way for way in arguments.ways if not lacking_for(way)]
    for way in set(arguments.ways).difference(ways):
        print(f"launcher.py: skipping {way}, which needs {lacking_for(way)}", file=sys.stderr)
    bed = Testbed(f"bench{os.getpid()}")
    with tempfile.TemporaryDirectory(prefix="launcher-benchmark-") as folder:
        try:
            share = {str(CHECKOUT), sys.prefix, sys.base_prefix, folder}
            bed.up(Settings(hosts=HOSTS, share=tuple(sorted(share))))
            bench = Bench(bed, Path(folder))
            found = run(bench, ways, arguments.repeats, arguments.seconds, arguments.starts_only)
        except TestbedError as error:
            return fail("launcher.py", error)
        finally:
            bed.down()
    result = {
        "turns": {"repeats": arguments.repeats, "seconds": arguments.seconds, "starts_only": arguments.starts_only},
        **facts("launcher.py", argv, {"paramiko": installed("paramiko")}),
        "ways": found,
    }
    show(result, arguments.format, table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
