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
from dmltrain_launch.clusters.launcher import Launcher, own_options
from dmltrain_launch.job.host import Host
from dmltrain_launch.job.options import Options
from dmltrain_launch.job.options.option import Record, option, text


@own_options
class NextOptions(Options):
    next_name: str = option("NAME", "name of the host", text("a name"), "next", record=Record())


LAUNCHER = Launcher("a host called next", NextOptions, ("interface", "subnet"))


class Cluster:
    def __init__(self, options, hosts=None):
        self.hosts = list(hosts or [Host(options.next_name, "127.0.0.1", sys.executable)])

    def connect(self, host, mark, timeout=None):
        return LocalChannel(host, mark)

    def close(self):
        pass
'''
ROW = '    "next",\n'


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """A copy of launch with the launcher `next`."""
    copy = copy_packages(tmp_path_factory.mktemp("tree"), "launch/dmltrain_launch")
    clusters = "launch/dmltrain_launch/clusters"
    one_more(copy, f"{clusters}/next.py", FILE, f"{clusters}/__init__.py", "NAMES = (\n", ROW)
    return copy


def launch(tree: Path, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "dmltrain_launch.cli", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(tree / "launch")}
    return subprocess.run(command, env=environment, cwd=tree, capture_output=True, text=True)


def test_it_runs_a_job(tree):
    words = "--launcher next --next-name other --log-dir logs -n 2 -s 1 sh -c"
    ran = launch(tree, *words.split(), "echo $DMLC_ROLE")
    assert (ran.returncode, ran.stderr.splitlines()[-1]) == (0, "0 processes left on 1 host"), ran.stderr
    assert (tree / "logs/worker-1.log").read_text() == "worker\n"
    record = json.loads((tree / "logs/job.json").read_text())
    names = record["launcher"], record["hosts"][0]["name"], record["reached_by"]["next_name"]
    assert names == ("next", "other", "other")
    assert record["hosts"][0]["address"], "it is looked at first, as a host of a network"


def test_help_errors_and_dry_run_know_it(tree):
    assert "next (a host called next)" in launch(tree, "--help").stdout
    assert "next (a host called next)" in launch(tree, "--launcher", "nowhere").stderr
    words = "--launcher next --interface lo --dry-run -n 1 true"
    assert "by next; nothing is started" in launch(tree, *words.split()).stdout
    refused = launch(tree, "--launcher", "next", "--ssh-port", "9", "-n", "1", "true").stderr
    assert "--ssh-port needs --launcher ssh, but this job uses next: remove it" in refused
    refused = launch(tree, "--launcher", "local", "--next-name", "9", "-n", "1", "true").stderr
    assert "--next-name needs --launcher next, but this job uses local: remove it" in refused
