"""One run of a test file under the conditions."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from tests.flaky.conditions import Conditions

NOTHING_TO_RUN = 5  # pytest's exit code
PATIENCE = 60.0  # s that an interrupted pytest has to end what it has started


def run(file: str, marks: str, conditions: Conditions, name: str, end_at: float) -> bool:
    """Whether it failed; then the report is printed. No test starts after `end_at`."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.flaky.plugin", "--flaky", str(conditions.folder)]
    command += ["--flaky-end", str(end_at)]
    log = conditions.folder / "pytest.log"
    conditions.begin()
    began = time.monotonic()
    with open(log, "wb") as output:  # a session of its own: Ctrl-C comes to this process only, which passes it on
        process = subprocess.Popen(
            [*command, "-m", marks, file], stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        code = process.wait()
    except BaseException:
        ignore_interrupts()
        end(process)
        raise
    conditions.end_run()
    failed = code not in (0, NOTHING_TO_RUN)
    said = f"failed with exit code {code}" if failed else "passed" if code == 0 else "has no such tests"
    print(f"{name}: {file} {said} after {time.monotonic() - began:.1f} s", flush=True)
    if failed:
        print(log.read_text(errors="replace"))
        print(
            f"Load: {' '.join(f'{each:.1f}' for each in os.getloadavg())}. Processes frozen, since the start of pytest:"
        )
        print(*(conditions.freezes() or ["none"]), sep="\n", flush=True)
    return failed


def ignore_interrupts() -> None:
    """Of the impatient: to end all that runs takes a while."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGINT)
    try:
        process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
