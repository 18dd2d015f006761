"""A job in YARN whose containers are on different hosts; `tests/launch/yarn_server.py` says what is YARN's there."""

import json
import os
import signal
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster import engines
from tests.cluster.launching import LONGEST
from tests.cluster.layout import LOGIN
from tests.cluster.testbed import Testbed
from tests.launch.conftest import Launched, Launcher, Result
from tests.launch.test_yarn import PROGRAM, by_yarn
from tests.launch.yarn_server import PATH, Yarn, yarn
from tests.waiting import wait_for

QUOTED = 'a "b" $c'
HOSTS = ("h1", "h2")


@pytest.mark.thorough
def test_a_job_runs_in_containers_and_is_followed_to_its_end(testbed: Testbed, tmp_path: Path):
    """The command is given outside of the cluster, which reaches nothing there."""

    def place(component: str, index: int, script: Path) -> list[str]:
        return testbed.command(LOGIN if component == "launcher" else f"h{index + 1}", ["bash", str(script)])

    with yarn(tmp_path / "nodes", place=place) as server:
        launcher = Launcher(tmp_path)
        launcher.script(PROGRAM)
        words = ["fail", QUOTED, str(tmp_path / "said")]
        done = launcher.run(*by_yarn(server), "-n", 2, "-s", 1, "program.py", *words)
        assert done.code == 3, done
        assert {path for method, path, _ in server.requests if method == "POST"} == {"/app/v1/services"}
        assert all(user for _, _, user in server.requests) and not server.services
    logs = tmp_path / "logs"
    said = [(logs / f"worker-{rank}.log").read_text() for rank in (0, 1)]
    assert sorted(text.split(" on ")[1] for text in said) == [f"{host} None {words}\n" for host in HOSTS]
    record = json.loads((logs / "job.json").read_text())
    assert (record["launcher"], record["exit_code"]) == ("yarn", 3)
    assert [each["name"] for each in record["hosts"]] == ["h1", "h2"]
    for said in ("worker 1 (pid", "exited with code 3", "0 processes left on 2 hosts"):
        assert said in done.err, done
    assert b"worker 0 on h" in done.out
    assert not (logs / "bridge.json").exists()
    assert not [process for host in HOSTS for process in testbed.processes(host)], os.listdir(tmp_path / "nodes")


class Followed(Launched):
    """The command that follows a job, outside of the cluster."""

    def log(self, name: str) -> str:
        return super().log(name).decode()

    def wait(self) -> Result:
        return super().wait(LONGEST)


@dataclass
class Engine(engines.Engine):
    """See `tests.cluster.engines`. The launcher's container is on h5."""

    server: Yarn
    bed: Testbed
    laptop: Launcher
    name = "yarn"

    @property
    def testbed(self) -> Testbed:
        return self.bed

    def job(self, *arguments: object) -> Followed:
        words = map(str, ("--log-dir", "logs", *by_yarn(self.server), "--job", "train", *arguments))
        folder = self.laptop.folder
        return Followed(list(words), folder, folder / "logs", env=self.laptop.environment)

    def script(self, text: str) -> Path:
        return self.laptop.script(text)

    def start(self, fault: str = "", *options: object) -> Followed:
        job = self.job("-n", 2, "-s", 0, *options, self.script(engines.PROGRAM).name)
        wait_for(lambda: all("up" in job.log(f"worker-{rank}") for rank in (0, 1)), "the workers", LONGEST)
        return job

    def cancel(self) -> None:
        """As `yarn app -destroy` does."""
        request = urllib.request.Request(f"{self.server.url}{PATH}/train?user.name=me", method="DELETE")
        urllib.request.urlopen(request).close()

    def interrupt(self, job: Followed) -> None:
        job.process.send_signal(signal.SIGINT)

    def restore(self, node: str) -> None:
        self.testbed.boot(node)

    def records(self) -> list[str]:
        return list(self.server.services)


@pytest.fixture
def engine(testbed: Testbed, tmp_path: Path) -> Iterator[Engine]:
    def place(component: str, index: int, script: Path) -> list[str]:
        """All processes of a container end with it, as YARN ends them."""
        alone = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "bash", str(script)]
        return testbed.command("h5" if component == "launcher" else f"h{index + 1}", alone)

    with yarn(tmp_path / "nodes", place=place) as server:
        yield Engine(server, testbed, Launcher(tmp_path))


class TestContract(engines.Contract):
    """Of YARN."""
