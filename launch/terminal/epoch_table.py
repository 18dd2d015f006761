"""Print the table of a training job's epochs with dmltrain-parse."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TABLE_SECONDS = 60.0
LINE_BYTES = 1 << 16


def print_epochs(folder: Path) -> None:
    """Print the table for the logs in `folder`, if they have epochs and dmltrain-parse is installed."""
    try:
        with open(folder / "worker-0.log", "rb") as log:
            trains = any(b"Epoch[" in line for line in iter(lambda: log.readline(LINE_BYTES), b""))
        if trains:
            sys.stdout.flush()
            subprocess.run([sys.executable, "-m", "dmltrain.report.cli", str(folder)], timeout=TABLE_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return
