"""Mutation testing: which small changes of a module do its nearest tests notice?

python -m tests.mutation.run dmltrain/kvstore/codec --sample 100      some mutants of all modules in a folder
python -m tests.mutation.run --changed main                           those in lines that differ from a commit
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from tests.mutation import equivalent, mutants, nearest, trial

ROOT = Path(__file__).parents[2]
PACKAGES = ("dmltrain", "launch/dmltrain_launch")
NOTICED = ("failed", "too slow", "broken")
# A mutant of code that kills a job's processes may kill all others, too: trials see no processes but their own.
NAMESPACE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
OF_A_USER = ["--user", "--map-current-user"]  # who is not root needs a user namespace for that
IN_NAMESPACE = "DMLTRAIN_MUTATION_IN_NAMESPACE"


@dataclass(frozen=True)
class Candidate:
    """A mutant of a module (its path), with the tests that should notice it."""

    module: str
    mutant: mutants.Mutant
    tests: tuple[str, ...]


def modules(places: Iterable[str]) -> list[str]:
    """The Python files that these paths, or dotted names, stand for. Raises SystemExit for one that is not there."""
    found: list[str] = []
    for place in places:
        path = ROOT / (place if "/" in place or place.endswith(".py") else place.replace(".", "/"))
        path = path if path.exists() else path.with_suffix(".py")
        if not path.exists():
            raise SystemExit(f"no module {place}: give a path, as dmltrain/kvstore/codec, or a dotted name")
        files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        found += [file.relative_to(ROOT).as_posix() for file in files]
    return list(dict.fromkeys(found))


def changed(base: str) -> dict[str, set[int]]:
    """module -> its lines that differ from the commit where this branch left `base`; uncommitted ones as well."""
    fork = _git("merge-base", base, "HEAD").strip()
    diff = _git("diff", "--unified=0", fork, "--", *(f"{package}/*.py" for package in PACKAGES))
    lines: dict[str, set[int]] = defaultdict(set)
    module = ""
    for line in diff.splitlines():
        if line.startswith("+++ "):
            module = line.removeprefix("+++ b/")
        elif span := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            lines[module] |= set(range(int(span[1]), int(span[1]) + int(span[2] or 1)))
    return {module: numbers for module, numbers in lines.items() if module.endswith(".py")}


def _git(*words: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, check=True, text=True).stdout


def candidates(wanted: dict[str, Collection[int] | None], tests: list[str]) -> list[Candidate]:
    """All mutants of these modules, in these lines of them (None: in all), but the equivalent ones."""
    known = equivalent.read(equivalent.FILE.read_text(encoding="utf-8"))
    found = []
    for module, lines in wanted.items():
        near = tuple(tests or nearest.of(ROOT, module))
        found += [
            Candidate(module, mutant, near)
            for mutant in mutants.of((ROOT / module).read_text(encoding="utf-8"))
            if (lines is None or mutant.line in lines) and (module, mutant.before, mutant.after) not in known
        ]
    return found


class Session:
    """Trials side by side, each in a copy of the project of its own."""

    def __init__(self, chosen: list[Candidate], jobs: int, longest: float) -> None:
        self._left = list(reversed(chosen))
        self._longest = longest  # seconds that one test file may take
        self._jobs = jobs
        self._seconds: dict[str, float] = {}
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self.stopped_by = 0  # the signal that did
        self.results: list[tuple[Candidate, str]] = []

    def run(self) -> None:
        with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
            copies = [trial.copy_of(ROOT, Path(folder) / str(number)) for number in range(self._jobs)]
            try:
                self._measure(copies[0])
                threads = [threading.Thread(target=self._work, args=(copy,)) for copy in copies]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
            finally:  # also when the tests fail without a mutant
                trial.unmount(Path(folder))

    def stop(self, number: int, frame: object) -> None:
        """Handle a signal: end the trials that run, and begin no more. `run` then removes the copies, and returns."""
        self.stopped_by = number
        self._stopped.set()

    def _measure(self, copy: Path) -> None:
        """How long each test file takes without a mutant; those that take too long are left out. Raises SystemExit
        where one fails, or where none is left for a mutant."""
        for test in dict.fromkeys(test for each in self._left for test in each.tests):
            outcome, printed, took = trial.run(copy, [test], self._longest, self._stopped)
            if self._stopped.is_set():
                return
            if outcome in ("failed", "broken"):
                raise SystemExit(f"without any mutant, {test}: {outcome}\n{printed}")
            if outcome == "passed":
                self._seconds[test] = took
            print(f"{took:6.1f} s without a mutant: {test}{', left out' * (outcome != 'passed')}", flush=True)
        self._left = [replace(each, tests=tuple(filter(self._seconds.get, each.tests))) for each in self._left]
        if lonely := {each.module for each in self._left if not each.tests}:
            raise SystemExit(f"no tests are near {', '.join(lonely)}; name some with --tests, or give a --longest")

    def _limit(self, candidate: Candidate) -> float:
        """Seconds that its tests may take."""
        return 15.0 + 4.0 * sum(self._seconds[test] for test in candidate.tests)

    def _work(self, copy: Path) -> None:
        while (candidate := self._next()) is not None:
            target = copy / candidate.module
            original = target.read_text(encoding="utf-8")
            target.write_text(candidate.mutant.source, encoding="utf-8")
            outcome, _, took = trial.run(copy, list(candidate.tests), self._limit(candidate), self._stopped)
            target.write_text(original, encoding="utf-8")
            with self._lock:
                self.results.append((candidate, outcome))
                print(describe(candidate, outcome, took), flush=True)

    def _next(self) -> Candidate | None:
        with self._lock:
            return self._left.pop() if self._left and not self._stopped.is_set() else None


def describe(candidate: Candidate, outcome: str, took: float) -> str:
    if outcome in NOTICED:
        return f"{outcome:8} {took:6.1f} s  {candidate.module}:{candidate.mutant.line}"
    mutant = candidate.mutant
    return f"SURVIVED {took:6.1f} s  {candidate.module}:{mutant.line}\n- {mutant.before}\n+ {mutant.after}"


def table(results: list[tuple[Candidate, str]]) -> str:
    """Markdown: of each module and of all how many mutants were tried, and how many noticed."""
    rows = ["| module | mutants | noticed | too slow | score |", "|---|---|---|---|---|"]
    by_module: dict[str, Counter[str]] = defaultdict(Counter)
    for candidate, outcome in results:
        by_module[candidate.module][outcome] += 1
        by_module["all"][outcome] += 1
    for module, counted in sorted(by_module.items(), key=lambda row: (row[0] == "all", row[0])):
        noticed = sum(counted[word] for word in NOTICED)
        rows.append(
            f"| {module} | {counted.total()} | {noticed} | {counted['too slow']} | "
            f"{100 * noticed / counted.total():.0f} % |"
        )
    return "\n".join(rows)


def options(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", help="files, folders or dotted names")
    parser.add_argument("--changed", metavar="COMMIT", help="the lines that differ from where this branch left COMMIT")
    parser.add_argument("--sample", type=int, help="so many mutants, drawn at random, of all that there are")
    parser.add_argument("--seed", type=int, default=1, help="of the sample (default 1)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="trials side by side (default: the cores)")
    parser.add_argument("--tests", nargs="+", default=[], help="these tests instead of the nearest")
    parser.add_argument("--longest", type=float, default=60.0, help="leave out test files that take more seconds (60)")
    parser.add_argument("--at-least", type=float, default=90.0, help="the score, in %%, below which this fails (90)")
    parser.add_argument("--list", action="store_true", help="print mutants and tests, and try none")
    return parser.parse_args(words)


def in_a_namespace() -> int:
    """Run this program in a process namespace of its own; its exit code. Raises SystemExit where there can be none."""
    unshare = NAMESPACE + (OF_A_USER if os.geteuid() else [])
    try:
        subprocess.run([*unshare, "true"], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(
            f"cannot run mutants in a process namespace ({getattr(error, 'stderr', '') or error}): they could kill "
            f"your other processes. Run as root, or in a container; {IN_NAMESPACE}=1 runs them all the same"
        ) from None
    command = [*unshare, sys.executable, "-u", "-m", "tests.mutation.run", *sys.argv[1:]]
    inside = psutil.Popen(command, env=os.environ | {IN_NAMESPACE: "1"})
    signal.signal(signal.SIGTERM, lambda *_: [child.terminate() for child in inside.children()])  # unshare ignores it
    with contextlib.suppress(KeyboardInterrupt):  # which the terminal sends to the program inside, too
        inside.wait()
    return inside.wait()


def main() -> None:
    arguments = options()
    if not arguments.modules and not arguments.changed:
        raise SystemExit("name modules, or --changed COMMIT")
    if IN_NAMESPACE not in os.environ and not arguments.list:
        sys.exit(in_a_namespace())
    wanted: dict[str, Collection[int] | None] = dict.fromkeys(modules(arguments.modules))
    wanted |= changed(arguments.changed) if arguments.changed else {}
    chosen = candidates(wanted, arguments.tests)
    everything = len(chosen)
    if arguments.sample and arguments.sample < everything:
        chosen = sorted(random.Random(arguments.seed).sample(chosen, arguments.sample), key=chosen.index)
    if arguments.list:
        for each in chosen:
            print(f"{each.module}:{each.mutant.line}\n- {each.mutant.before}\n+ {each.mutant.after}")
        return
    if not chosen:
        return print("nothing to mutate")
    session = Session(chosen, arguments.jobs, arguments.longest)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, session.stop)
    session.run()
    if session.stopped_by:
        sys.exit(128 + session.stopped_by)
    print(f"\n{len(chosen)} of {everything} mutants, seed {arguments.seed}\n\n{table(session.results)}")
    noticed = sum(outcome in NOTICED for _, outcome in session.results)
    sys.exit(100 * noticed / len(chosen) < arguments.at_least)


if __name__ == "__main__":
    main()
