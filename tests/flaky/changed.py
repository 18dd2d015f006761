"""Which test files have changed."""

from __future__ import annotations

import subprocess
from pathlib import Path

COMMITS = 20  # that count as lately
BASES = (
    "git merge-base HEAD origin/main",
    "git describe --tags --abbrev=0",
    f"git rev-list --first-parent --max-count={COMMITS + 1} HEAD",
)


def output(command: str, folder: Path) -> str:
    """ "" where it fails."""
    return subprocess.run(command.split(), cwd=folder, capture_output=True, text=True).stdout.strip()


def changed_tests(folder: Path = Path()) -> list[str]:
    """Since the branch left origin/main. Where nothing is different from that, as in a new clone, or there is no such
    branch: since the last tag, or else in the last COMMITS commits."""
    for command in BASES:
        *_, base = output(command, folder).splitlines() or [""]
        changed = output(f"git diff --name-only --diff-filter=d {base} --", folder).splitlines() if base else []
        if found := [name for name in changed if Path(name).match("test_*.py")]:
            return found
    return []
