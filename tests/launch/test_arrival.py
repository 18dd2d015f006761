"""How soon a worker that `dmltrain job add` adds to a running job makes its first step."""

from __future__ import annotations

import os
import re
import signal
import time
from datetime import datetime

import pytest

from launch.agent.process import process
from launch.cli import job
from tests.launch.conftest import ROOT, wait_for

pytestmark = [pytest.mark.alone, pytest.mark.thorough]

SECONDS = 5.0  # docs/elastic-members.md has what it takes on a busy machine
# An epoch takes about 18 s: who waited for its end would be late.
WORDS = ["--kv-store", "dist_sync", "--network", "mlp", "--batch-size", "4", "--num-epochs", "2"]
WORDS += ["--emulate-step", "0.1", "--disp-batches", "1"]


def when(log: bytes, pattern: bytes) -> float | None:
    """When the first such line was written, in s since 1970."""
    found = re.search(rb"^(.{23}) Node\[2\] " + pattern, log, re.MULTILINE)
    return datetime.strptime(found[1].decode(), "%Y-%m-%d %H:%M:%S,%f").timestamp() if found else None


def test_a_worker_that_is_added_makes_its_first_step_within_5_s_of_its_own_start(launcher, capsys):
    """The program's own start, from when its process begins until it is ready, does not count."""
    launched = launcher.start("-n", 2, "-s", 1, "--elastic", ROOT / "examples/train_digits.py", *WORDS)
    wait_for(lambda: b"View 1" in launched.log("worker-1"), "the first view")
    asked = time.clock_gettime(time.CLOCK_BOOTTIME)
    assert job(["add", str(launched.logs), "1"]) == 0
    assert capsys.readouterr().out == "worker 2 on localhost has joined the job in view 2\n"
    wait_for(lambda: when(launched.log("worker-2"), rb"Epoch\[0\] Batch "), "its first step")
    (pid,) = (each["pid"] for each in launched.record["processes"] if (each["role"], each["rank"]) == ("worker", 2))
    found, log = process(pid), launched.log("worker-2")
    launched.process.send_signal(signal.SIGINT)
    ready, stepped = when(log, rb"Elastic: "), when(log, rb"Epoch\[0\] Batch ")
    assert found and ready and stepped
    tick = 1.0 / os.sysconf("SC_CLK_TCK")  # in which the kernel counts when a process started, and leaves the rest out
    parts = {"launcher": found.start * tick - asked, "join": stepped - ready}
    assert min(parts.values()) > -tick and sum(parts.values()) < SECONDS, parts
    assert launched.wait().code == 130
