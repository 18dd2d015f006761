"""Mutation testing itself: which mutants are made, and what becomes of a trial."""

import os
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

pytest.importorskip("libcst", reason="mutation testing needs: pip install 'dmltrain[mutation]'")

from tests import owners  # noqa: E402
from tests.mutation import equivalent, mutants, nearest, run, trial  # noqa: E402
from tests.waiting import wait_for  # noqa: E402

ROOT = Path(__file__).parents[2]
SOURCE = '''"""Words."""
from dataclasses import dataclass
from typing import TypeVar

Lid = TypeVar("Lid")
Sizes = dict[str, int]
LIMIT = 3  # of them


@dataclass
class Box:
    size: int = 2

    @property
    def full(self) -> bool:
        """More than fits."""
        return self.size > LIMIT

    def close(self, lid) -> None:
        if self.full:
            raise ValueError(f"{self.size} do not fit")
        lid.shut("all the way")
'''


def changes(source=SOURCE):
    return {(each.before, each.after) for each in mutants.of(source)}


def test_messages_and_declarations_are_not_mutated():
    for before, _ in changes():
        assert not before.startswith(('"""', "from", "@dataclass", "raise", "Lid", "Sizes")), before
    assert not any("XX" in after for _, after in changes())


def test_each_mutant_is_a_whole_module_that_differs_at_its_line():
    for mutant in mutants.of(SOURCE):
        compile(mutant.source, "mutant", "exec")
        old, new = SOURCE.splitlines(), mutant.source.splitlines()
        assert next(number for number, line in enumerate(old) if line != new[number]) == mutant.line - 1
    assert len({mutant.source for mutant in mutants.of(SOURCE)}) == len(mutants.of(SOURCE)) > 5


def tree(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.thorough
def test_modules_of_the_project_have_tests_near_them():
    """Each tenth, as all take long."""
    for module in run.modules(run.PACKAGES)[::10]:
        assert nearest.of(ROOT, module), module


@pytest.mark.thorough
def test_each_equivalent_mutant_is_one_of_today():
    """One whose module has changed is taken out of the list."""
    known = equivalent.read(equivalent.FILE.read_text())
    outdated = set(known)
    for module in {module for module, _, _ in known}:
        listed = {before for other, before, _ in known if other == module}
        found = mutants.of((ROOT / module).read_text(), listed)
        outdated -= {(module, each.before, each.after) for each in found}
    assert not outdated


@pytest.mark.parametrize("text", ["a.py\n- x\n+ y\n", "a.py\n- x\nwhy\n", "- x\n+ y\nwhy\n"])
def test_an_equivalent_mutant_needs_a_reason(text):
    assert equivalent.read("# words\n\na.py\n- x = 1\n+ x = 2\nIt is overwritten,\nalways.\n") == {
        ("a.py", "x = 1", "x = 2"): "It is overwritten, always."
    }
    with pytest.raises(ValueError, match="line 1: "):
        equivalent.read(text)


PROJECT = {
    "box.py": "def double(x):\n    return 2 * x\n",
    "tests/test_box.py": "from box import double\ndef test():\n    assert double(2) == 4\n",
}


def test_a_trial_tests_the_given_copy(tmp_path):
    folder = tree(tmp_path, {**PROJECT, "tmp/x": ""})
    assert trial.run(folder, ["tests/test_box.py"], 60.0)[0] == "passed"
    (folder / "box.py").write_text("def double(x):\n    return 3 * x\n")  # as long as it was
    assert trial.run(folder, ["tests/test_box.py"], 60.0)[0] == "failed"


def test_a_trial_that_hangs_is_ended_with_all_that_it_started(tmp_path):
    hangs = f"""
import signal, subprocess
def test(tmp_path):
    started = subprocess.Popen(["sleep", "1000"], cwd=tmp_path, start_new_session=True)
    open({str(tmp_path / "pid")!r}, "w").write(str(started.pid))
    signal.pause()
"""
    folder = tree(tmp_path, {"tmp/x": "", "tests/test_box.py": hangs})
    stopped = threading.Event()
    with ThreadPoolExecutor() as pool:
        running = pool.submit(trial.run, folder, ["tests/test_box.py"], 600.0, stopped)
        try:
            wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), "what it starts")
        finally:
            stopped.set()  # else it would be waited for
        assert running.result()[0] == "too slow"
    wait_for(lambda: not owners.started(int((tmp_path / "pid").read_text())), "the end of what it started")


@pytest.mark.thorough
def test_a_mutant_that_kills_every_process_kills_those_of_its_trial_only(tmp_path):
    tests = tmp_path / "test_killer.py"
    tests.write_text("import os, signal\ndef test():\n    os.kill(-1, signal.SIGCONT)\n    assert os.getpid() < 1000\n")
    root = tree(tmp_path / "project", {})
    for name in [
        "dmltrain/optimizers/schedule.py",
        *(path.relative_to(ROOT) for path in Path(__file__).parent.glob("*.[pt]*")),
    ]:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, root / name)
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    innocent = subprocess.Popen(["sleep", "1000"])
    innocent.send_signal(signal.SIGSTOP)
    words = f"-u -m tests.mutation.run dmltrain/optimizers/schedule.py --jobs 1 --sample 1 --tests={tests}".split()
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, *words], cwd=root, env=environment, capture_output=True, text=True)
    try:
        assert "without a mutant" in done.stdout, done.stderr
        assert psutil.Process(innocent.pid).status() == psutil.STATUS_STOPPED
    finally:
        innocent.kill()
        innocent.wait()
