"""What a reader of a failed test needs beside its own words: how busy the machine was, how long each phase took, and
the last lines of each process that wrote a log or an output below the test's folder."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

LINES, LETTERS, FILES = 6, 200, 24  # of each file; of a line; of a test
OUTPUTS = ("*.log", "err", "out", "*.err", "*.out")  # of processes and launchers
seconds = pytest.StashKey[dict[str, float]]()


def last_lines(folder: Path) -> str:
    """Of the files that processes have written last, the oldest first."""
    found = {path for pattern in OUTPUTS for path in folder.rglob(pattern) if path.is_file() and path.stat().st_size}
    said = []
    for path in sorted(found, key=lambda path: path.stat().st_mtime)[-FILES:]:
        with path.open("rb") as file:
            file.seek(-min(path.stat().st_size, LINES * LETTERS), os.SEEK_END)
            lines = file.read().decode(errors="replace").splitlines()[-LINES:]
        said += [f"-- {path.relative_to(folder)}", *(line[:LETTERS] for line in lines)]
    return "\n".join(said)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
    report = yield
    phases = item.stash.setdefault(seconds, {})
    phases[call.when] = call.duration
    if report.failed:
        took = ", ".join(f"{phase} {duration:.1f} s" for phase, duration in phases.items())
        report.sections.append(("machine", f"{took}; load {' '.join(f'{each:.1f}' for each in os.getloadavg())}"))
        folder = getattr(item, "funcargs", {}).get("tmp_path")
        if folder and (said := last_lines(folder)):
            report.sections.append(("last lines of processes", said))
    return report
