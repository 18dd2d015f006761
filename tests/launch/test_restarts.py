"""--max-restarts: what happens between the attempts of a job, and to one that somebody wants to end."""

import json
import os
import signal

from launch.cli import launch
from tests.waiting import wait_for

FAILS = 'echo "attempt $DMLTRAIN_RESTART of $DMLTRAIN_JOB"; exit 3'


def test_every_attempt_has_a_mark_and_a_folder_of_its_own(launcher):
    launched = launcher.start("-n", 1, "-s", 0, "--max-restarts", 1, "sh", "-c", FAILS)
    launched.ends(3)
    first = launched.log("worker-0").decode().split()
    second = (launched.logs / "restart-1/worker-0.log").read_text().split()
    assert (first[1], second[1]) == ("0", "1")
    assert first[3] != second[3], "an old agent that is still ending must spare the new attempt"
    assert [each["exit_code"] for each in launched.record["restarts"]] == [3]
    assert launched.record["mark"] == second[3]


def test_a_signal_between_two_attempts(launcher):
    launched = launcher.start("-n", 1, "-s", 0, "--max-restarts", 9, "sh", "-c", FAILS)
    wait_for(lambda: "restart 3 of 9" in launched.err.read_text(), "the third restart, 4 s before it starts")
    launched.signal(signal.SIGTERM)
    result = launched.ends(143)
    assert result.err.splitlines()[-1] == "0 processes left on 1 host"
    assert launched.record["ended"] and not (launched.logs / "restart-3/worker-0.log").exists()
    assert result.seconds < 3


def test_a_killed_job_is_not_started_anew_by_a_launcher_elsewhere(launcher, monkeypatch):
    launched = launcher.ready(1, 0, "--max-restarts", 9, "--job", "endless", "sh", "-c", "echo ready; exec sleep 120")
    record = launched.record
    record["launched_from"]["pid"] = 2**22 + os.getpid()  # as if it were another machine's: no such process here
    (launched.logs / "job.json").write_text(json.dumps(record))
    monkeypatch.chdir(launcher.folder)
    assert launch(["--kill", str(launched.logs)]) == 0
    result = launched.wait()
    assert result.code in (125, 143), result  # its agent and its worker are asked to end at the same time
    assert "restart" not in result.err
