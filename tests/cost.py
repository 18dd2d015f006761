"""What each test costs: seconds, and seconds of processors that it and all of its processes have used.

    python -m pytest -p tests.cost --cost build/cost ...        # writes build/cost/WORKER.jsonl
    python -m tests.cost build/cost                             # prints tables by file and by kind of process

A process of pytest enters a control group of its own, in which all that it starts stays, wherever its parent ends: the
kernel counts what the group has used. Which kind of process used it is looked up several times a second, so what ends
between two looks counts as "short-lived". Needs root and a mount of cgroup2.
"""

import json
import os
import re
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import control_groups

LOOK_SECONDS = 0.5
TICK = os.sysconf("SC_CLK_TCK")
KINDS = {  # of processes, by their command lines; the first that matches
    "pytest": r"-m pytest|exec\(eval\(sys\.stdin|pytest-xdist",  # which may show its test
    "forked job": r"tests\.forked_job",
    "agent": r"dmltrain-agent|launch/dmltrain_launch/agent",
    "launcher": r"launch\.cli|dmltrain-launch|dmltrain-job|dmltrain-check|dmltrain job",
    "Ray": r"ray::|raylet|gcs_server|ray/|ray_driver|/ray\b|-m ray",
    "Kubernetes": r"etcd|kube|kubelet",
    "Slurm": r"slurm|munge|srun|sbatch|scancel",
    "browser": r"chrom",
    "MPI": r"mpirun|orted|hydra|mpiexec|prterun",
    "SSH": r"sshd|\bssh\b|ssh-",
    "benchmark": r"benchmarks/",
    "report": r"dmltrain-parse|dmltrain-report|report\.cli|page\.cli",
    "compiler": r"cc1|/ld\b|gcc|g\+\+",
    "other Python": r"python",
}


def kind(words: str) -> str:
    return next((name for name, pattern in KINDS.items() if re.search(pattern, words)), "other")


class Group:
    """This process' control group."""

    def __init__(self) -> None:
        top = dict(reversed(control_groups.mounts()))["cgroup2"]
        self._path = top / f"dmltrain-cost-{os.getpid()}"
        self._path.mkdir()
        (self._path / "cgroup.procs").write_text(str(os.getpid()))
        self._kinds: dict[tuple[int, str], tuple[str, float]] = {}  # by process; and its seconds
        threading.Thread(target=self._look_on, daemon=True).start()

    def seconds(self) -> float:
        return int((self._path / "cpu.stat").read_text().split()[1]) / 1e6

    def by_kind(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for name, seconds in list(self._kinds.values()):
            found[name] += seconds
        return found

    def _look_on(self) -> None:
        while True:
            for pid in (self._path / "cgroup.procs").read_text().split():
                try:
                    self._look(int(pid))
                except (OSError, IndexError):  # it has ended meanwhile
                    continue
            time.sleep(LOOK_SECONDS)

    def _look(self, pid: int) -> None:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        process, seconds = (pid, fields[19]), (int(fields[11]) + int(fields[12])) / TICK
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        self._kinds[process] = kind(words or Path(f"/proc/{pid}/comm").read_text()), seconds


class Plugin:
    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / f"{os.environ.get('PYTEST_XDIST_WORKER', 'alone')}.jsonl").open("a")
        self._group = Group()
        self._note("(start)", 0.0, 0.0, Counter())

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        group = self._group
        began, used, kinds = time.monotonic(), group.seconds(), group.by_kind()
        result = yield
        self._note(item.nodeid, time.monotonic() - began, group.seconds() - used, group.by_kind() - kinds)
        return result

    @pytest.hookimpl
    def pytest_sessionfinish(self) -> None:
        self._note("(end)", 0.0, self._group.seconds(), self._group.by_kind())

    def _note(self, test: str, seconds: float, used: float, kinds: Counter[str]) -> None:
        row = {"test": test, "seconds": round(seconds, 3), "cpu": round(used, 3)}
        row["kinds"] = {name: round(kind, 2) for name, kind in kinds.items()}
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cost", type=Path, help="the folder for tests.cost")


def pytest_configure(config: pytest.Config) -> None:
    folder = config.getoption("--cost")
    if folder and (hasattr(config, "workerinput") or not config.getoption("numprocesses", None)):
        config.pluginmanager.register(Plugin(folder))


# -- the tables -------------------------------------------------------------------------------------------------------


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines()]


def table(found: list[dict[str, Any]], longest: int = 60) -> str:
    tests = [row for row in found if not row["test"].startswith("(")]
    files: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in tests:
        files[row["test"].partition("::")[0]].append(row)
    lines = ["processor s | s | tests | file"]
    for file, its in sorted(files.items(), key=lambda each: -sum(row["cpu"] for row in each[1]))[:longest]:
        cpu, seconds = (sum(row[name] for row in its) for name in ("cpu", "seconds"))
        lines.append(f"{cpu:8.1f} | {seconds:8.1f} | {len(its):5} | {file}")
    ends = [row for row in found if row["test"] == "(end)"]
    kinds: Counter[str] = Counter()
    for row in ends:
        kinds.update(row["kinds"])
    total = sum(row["cpu"] for row in ends) or 1.0
    kinds["short-lived"] = total - sum(kinds.values())
    lines.append(f"\n{total:.0f} s of processors, {sum(row['seconds'] for row in tests):.0f} s of {len(tests)} tests")
    lines += [f"{seconds:8.1f} | {100 * seconds / total:4.1f} % | {name}" for name, seconds in kinds.most_common()]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(rows(Path(sys.argv[1]))))
