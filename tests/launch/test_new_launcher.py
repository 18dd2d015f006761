"""A launcher is one file and one row: here is one, in a copy of the tree."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.copied_tree import copy_packages, one_more

FILE = '''"""Processes beside the launcher, on a host that is called next."""

import sys

from dmltrain_launch.channels.process import LocalChannel
from dmltrain_launch.job.host import Host


class Cluster:
    def __init__(self, options, hosts=None):
        self.hosts = list(hosts or [Host("next", "127.0.0.1", sys.executable)])

    def connect(self, host, mark, timeout=None):
        return LocalChannel(host, mark)

    def close(self):
        pass
'''
ROW = '    "next": Launcher("a host called next", ("--interface", "--subnet")),\n'


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """A copy of launch with the launcher `next`."""
    copy = copy_packages(tmp_path_factory.mktemp("tree"), "launch/dmltrain_launch")
    clusters = "launch/dmltrain_launch/clusters"
    one_more(copy, f"{clusters}/next.py", FILE, f"{clusters}/__init__.py", "LAUNCHERS = {\n", ROW)
    return copy


def launch(tree: Path, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "dmltrain_launch.cli", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(tree / "launch")}
    return subprocess.run(command, env=environment, cwd=tree, capture_output=True, text=True)


def test_it_runs_a_job(tree):
    ran = launch(tree, "--launcher", "next", "--log-dir", "logs", "-n", "2", "-s", "1", "sh", "-c", "echo $DMLC_ROLE")
    assert (ran.returncode, ran.stderr.splitlines()[-1]) == (0, "0 processes left on 1 host"), ran.stderr
    assert (tree / "logs/worker-1.log").read_text() == "worker\n"
    record = json.loads((tree / "logs/job.json").read_text())
    assert (record["launcher"], record["hosts"][0]["name"]) == ("next", "next")
    assert record["hosts"][0]["address"], "it is looked at first, as a host of a network"


def test_help_errors_and_dry_run_know_it(tree):
    assert "next (a host called next)" in launch(tree, "--help").stdout
    assert "next (a host called next)" in launch(tree, "--launcher", "nowhere").stderr
    assert "by next; nothing is started" in launch(tree, "--launcher", "next", "--dry-run", "-n", "1", "true").stdout
    refused = launch(tree, "--launcher", "next", "--ssh-port", "9", "-n", "1", "true").stderr
    assert "--ssh-port needs --launcher ssh, but this job uses next: remove it" in refused
    quiet = launch(tree, "--launcher", "next", "--interface", "lo", "--dry-run", "-n", "1", "true")
    assert "--interface is for" not in quiet.stderr
