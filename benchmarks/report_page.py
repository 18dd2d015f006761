"""Time, memory and size of dmltrain-report's page: python benchmarks/report_page.py [--runs 8] [--epochs 300]

The logs are written as dmltrain writes them, with usage.csv of a host for each worker, sampled a thousand times.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tests.report.page import written  # noqa: E402  (tests is no installed package)

SAMPLES = 1000  # of each host
REPEATS = 5
# The rusage of a child begins with the memory of the process that started it; VmHWM does not.
PROGRAM = """import sys
from dmltrain.report.page import cli
code = cli.main(sys.argv[1:])
print(open("/proc/self/status").read().partition("VmHWM:")[2].split()[0], file=sys.stderr)
sys.exit(code)"""


@dataclass(frozen=True)
class Measured:
    seconds: float
    cpu_seconds: float
    mib: float  # the largest resident memory
    page_bytes: int


def write(folder: Path, runs: int, epochs: int, workers: int) -> list[Path]:
    """The log folders of `runs` jobs."""
    folders = [written.run(folder / f"run-{number}", epochs, workers, number) for number in range(runs)]
    for each in folders:
        written.samples(each, workers, SAMPLES)
    return folders


def measure(folders: Sequence[Path], page: Path) -> Measured:
    """Make the page once, in a process of its own."""
    command = [sys.executable, "-c", PROGRAM, *map(str, folders), "-o", str(page)]
    start = time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    with process.stderr:
        said = process.stderr.read().decode()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.perf_counter() - start
    if process.returncode:
        raise RuntimeError(f"dmltrain-report ended with {process.returncode}: {said}")
    return Measured(seconds, used.ru_utime + used.ru_stime, int(said.split()[-1]) / 1024, page.stat().st_size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("runs", 8), ("epochs", 300), ("workers", 10)):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folders = write(Path(name), arguments.runs, arguments.epochs, arguments.workers)
        size = sum(file.stat().st_size for folder in folders for file in folder.iterdir())
        found = [measure(folders, Path(name, "report.html")) for _ in range(REPEATS)]
    times, cpu = ([getattr(each, field) for each in found] for field in ("seconds", "cpu_seconds"))
    print(f"{size / 1e6:.1f} MB of logs: median of {REPEATS} (range)")
    print(f"seconds      {statistics.median(times):.2f} ({min(times):.2f} to {max(times):.2f})")
    print(f"CPU seconds  {statistics.median(cpu):.2f} ({min(cpu):.2f} to {max(cpu):.2f})")
    print(f"memory       {max(each.mib for each in found):.0f} MiB")
    print(f"page         {found[0].page_bytes / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
