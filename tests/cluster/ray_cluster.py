"""A real Ray cluster on the hosts of a test bed: its head and dashboard on `login`, a node on each other host.

`login` has no CPUs, so that nothing is placed there. Each other node says that it has two CPUs and two GPUs, which are
none. A node that does not answer is dead after about 3 s.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from tests.cluster.layout import LOGIN
from tests.cluster.testbed import Testbed
from tests.waiting import wait_for

PORT, DASHBOARD = 6379, 8265
NODES_SECONDS = 180.0  # on a machine that does much else
COMMAND_SECONDS = 180.0  # `ray job submit` returns when the job has ended
ATTEMPTS = 5  # to start a node: Ray gives up a raylet that has not started within 30 s
SETTINGS = {
    **{"RAY_USAGE_STATS_ENABLED": "0", "RAY_health_check_initial_delay_ms": "1000"},
    **{"RAY_health_check_period_ms": "1000", "RAY_health_check_timeout_ms": "1000"},
    **{"RAY_health_check_failure_threshold": "3", "RAY_memory_monitor_refresh_ms": "0"},
    **{"RAY_prestart_worker_first_driver": "0", "RAY_enable_metrics_collection": "0"},
    **{"RAY_worker_register_timeout_seconds": "60", "RAY_DASHBOARD_STARTUP_TIMEOUT_S": "180"},
}
COMMON = ("--object-store-memory=80000000", "--disable-usage-stats", "--include-log-monitor=false")
ASKS = "import sys, urllib.request as u; [print(u.urlopen(each, timeout=20).read().decode()) for each in sys.argv[1:]]"


def missing() -> str:
    """What this Python lacks, in a few words; "" when it has everything."""
    lacking = [name for name in ("ray", "aiohttp") if find_spec(name) is None]
    return f"{', '.join(lacking)} (pip install 'ray[default]')" if lacking else ""


class RayCluster:
    """Its processes are the hosts' own guests: the test bed's `sweep` ends them."""

    def __init__(self, testbed: Testbed):
        self.testbed = testbed
        self.nodes = [host for host in testbed.hosts if host != LOGIN]
        self.address = f"{testbed.address(LOGIN)}:{PORT}"

    def start(self) -> None:
        head = ("--head", f"--port={PORT}", f"--dashboard-port={DASHBOARD}", "--num-cpus=0", "--no-monitor")
        for _ in range(ATTEMPTS):
            if self._starts(LOGIN, *head):
                return self.repair()
            self.testbed.sweep()
        raise TimeoutError(f"Ray's head did not start in {ATTEMPTS} attempts: {head}")

    def repair(self) -> None:
        """Have a living node on each host. They start one after another: side by side on few busy cores Ray gives them
        up, and each would be started again."""
        words = (f"--address={self.address}", "--num-cpus=2", "--num-gpus=2")
        lacking = [node for node in self.nodes if not self._has_raylet(node)]
        for node in lacking:
            if not any(self._starts(node, *words) or self._has_raylet(node) for _ in range(ATTEMPTS)):
                raise TimeoutError(f"Ray's node {node} did not start in {ATTEMPTS} attempts")
        if lacking:
            self._wait_living()

    def _has_raylet(self, node: str) -> bool:
        return any(process.name == "raylet" for process in self.testbed.processes(node))

    def _starts(self, host: str, *words: str) -> bool:
        """Whether `ray start` with these words succeeds."""
        nowhere = subprocess.DEVNULL  # the daemons that it leaves hold its output
        more = {"env": self._environment(), "capture_output": False, "stdout": nowhere, "stderr": nowhere}
        return self.testbed.run(host, self._argv(host, *words), NODES_SECONDS, **more).returncode == 0

    def _wait_living(self) -> None:
        nodes = sorted(map(self.testbed.address, self.testbed.hosts))
        wait_for(lambda: self._living() == nodes, lambda: f"all nodes; alive: {self._living()}", NODES_SECONDS)

    def _living(self) -> list[str]:
        (nodes,) = self.listed("nodes")
        return sorted(row["node_name"] for row in nodes if row["state"] == "ALIVE")

    def _environment(self) -> dict[str, str]:
        return {**os.environ, **SETTINGS, "PATH": f"{sys.prefix}/bin:{os.environ['PATH']}"}

    def _argv(self, host: str, *arguments: str) -> list[str]:
        own = f"--node-ip-address={self.testbed.address(host)}"
        return [sys.executable, "-m", "ray.scripts.scripts", "start", own, *COMMON, *arguments]

    def listed(self, *names: str) -> list[list[dict[str, Any]]]:
        """What `ray list nodes|actors|placement_groups|jobs` says, the rows of each."""
        urls = [f"http://127.0.0.1:{DASHBOARD}/api/v0/{name}?limit=1000" for name in names]
        said = self.on(LOGIN, [sys.executable, "-S", "-c", ASKS, *urls])
        return [json.loads(line)["data"]["result"]["result"] for line in said.splitlines()]

    def job(self, verb: str, *arguments: str) -> str:
        """What `ray job VERB` prints."""
        argv = [sys.executable, "-m", "ray.scripts.scripts", "job", verb, f"--address=http://127.0.0.1:{DASHBOARD}"]
        return self.on(LOGIN, [*argv, *arguments])

    def submitted(self) -> list[str]:
        """What `ray job list` says of submitted jobs."""
        said = self.on(LOGIN, [sys.executable, "-S", "-c", ASKS, f"http://127.0.0.1:{DASHBOARD}/api/jobs/"])
        return [row["submission_id"] for row in json.loads(said) if row["type"] == "SUBMISSION"]

    def left(self) -> list[str]:
        """Placement groups and actors that Ray still has."""
        groups, actors = self.listed("placement_groups", "actors")
        found = [row for row in groups if row["state"] != "REMOVED"] + [row for row in actors if row["state"] != "DEAD"]
        return list(map(str, found))

    def on(self, host: str, argv: Sequence[str], env: Mapping[str, str] | None = None) -> str:
        """The standard output of a command, which must succeed."""
        ran = self.testbed.run(host, argv, COMMAND_SECONDS, env={**os.environ, **(env or {})})
        assert ran.returncode == 0, f"{argv} on {host}: {ran.returncode}: {ran.stdout} {ran.stderr}"
        return ran.stdout
