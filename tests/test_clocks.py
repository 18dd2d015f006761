"""The wall clock may jump during a job: nothing that decides reads it."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.copied_tree import search_path

ROOT = Path(__file__).parents[1]
READS = {"time", "time_ns", "localtime", "gmtime", "ctime", "strftime", "asctime", "clock_gettime", "CLOCK_REALTIME"}
READS |= {"now", "utcnow", "today"}
MODULES = {"time", "datetime", "date"}
MAY_READ = {  # file and function -> what for
    "dmltrain/logs/event_file.py __init__": "stamps of events, and the order of files",
    "dmltrain/kvstore/log.py log": "stamps of log lines",
    "launch/dmltrain_launch/agent/copy/copied.py store": "the time of a file",
    "launch/dmltrain_launch/agent/host/probe.py facts": "the host's clock, for a warning",
    "launch/dmltrain_launch/agent/host/probe.py poll": "the host's clock, for a warning",
    "launch/dmltrain_launch/agent/ending.py write_last_line": "the stamp of a log line",
    "launch/dmltrain_launch/certificate.py new": "it is valid from a day ago until ten years from now",
    "launch/dmltrain_launch/cli.py dry_run": "the date in a new job's name",
    "launch/dmltrain_launch/cli.py jobs": "the age of jobs in a list",
    "launch/dmltrain_launch/cli.py plan": "the date in a job's name",
    "launch/dmltrain_launch/cli.py start": "the date in a new job's name",
    "launch/dmltrain_launch/cli.py submit": "the date in a new job's name",
    "launch/dmltrain_launch/commands/doctor.py _clock": "the date of a report",
    "launch/dmltrain_launch/commands/visit.py write_end": "a date in a record",
    "launch/dmltrain_launch/commands/submit.py mark_ended": "a date in a record",
    "launch/dmltrain_launch/commands/submit.py _put": "a date in a record",
    "launch/dmltrain_launch/run/record.py end_of_attempt": "a date in a record",
    "launch/dmltrain_launch/run/report.py new_job_name": "the date in a new job's name",
    "launch/dmltrain_launch/run/intake.py asked": "how far the clocks of hosts differ, for a warning",
    "launch/dmltrain_launch/run/intake.py for_supervisor": "how far the clocks of hosts differ, for a warning",
    "launch/dmltrain_launch/run/job_record.py write_failure": "a date in a record",
    "launch/dmltrain_launch/run/start.py __init__": "a date in a record",
    "launch/dmltrain_launch/run/start.py _attempt": "a date in a record",
    "launch/dmltrain_launch/run/start.py _run": "a date in a record",
    "launch/dmltrain_launch/terminal/log_folder.py stamp": "a date in a record",
    "launch/dmltrain_launch/terminal/usage_file.py __init__": "stamps of rows",
    "dmltrain/base/whole_file.py _remove_if_left": "the age, in days, of what a killed writer of another host left",
}


def readings() -> set[str]:
    """'file function' of each use of the wall clock."""
    found = set()
    for path in [*(ROOT / "dmltrain").rglob("*.py"), *(ROOT / "launch").rglob("*.py")]:
        nodes = [*ast.walk(ast.parse(path.read_text()))]  # outer functions before inner ones
        functions = [(node.lineno, node.end_lineno, node.name) for node in nodes if isinstance(node, ast.FunctionDef)]
        for node in nodes:
            named = isinstance(node, ast.Attribute) and node.attr in READS and ends_with(node.value, MODULES)
            of_time = isinstance(node, ast.ImportFrom) and node.module == "time"
            if named or (of_time and {name.name for name in node.names} & READS):
                inside = [name for first, last, name in functions if first <= node.lineno <= (last or 0)]
                found.add(f"{path.relative_to(ROOT)} {inside[-1] if inside else ''}")
    return found


def ends_with(value: ast.expr, names: set[str]) -> bool:
    return (value.id if isinstance(value, ast.Name) else getattr(value, "attr", "")) in names


def test_only_stamps_and_dates_read_the_wall_clock():
    assert readings() == {*MAY_READ}


@pytest.mark.skipif(
    sys.version_info < (3, 11), reason="Python 3.10 measures the time limits of locks by the wall clock"
)
def test_a_job_is_unaffected_by_a_clock_that_jumps_by_an_hour(tmp_path):
    compiler = shutil.which("cc")
    if not compiler:
        pytest.skip("no C compiler, which builds the clock")
    clock = tmp_path / "clock.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", clock, ROOT / "tests/programs/jumping_clock.c"], check=True)
    launch = "-m dmltrain_launch.cli --launcher local -n 2 -s 1 --log-dir logs"
    command = [sys.executable, *launch.split(), sys.executable, str(ROOT / "tests/programs/clock_watcher.py"), "1.2"]
    variables = {**os.environ, "PYTHONPATH": search_path(), "LD_PRELOAD": str(clock)}
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr + done.stdout
    jumps = [int(seconds) for seconds in re.findall(r"rounds, wall clock (\d+) s", done.stdout)]
    assert len(jumps) == 2 and min(jumps) > 7000, done.stdout
