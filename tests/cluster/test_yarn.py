"""A job in YARN whose containers are on different hosts; `tests/launch/yarn_server.py` says what is YARN's there."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster import engines
from tests.cluster.launching import LONGEST, Result
from tests.cluster.layout import LOGIN
from tests.cluster.testbed import Testbed
from tests.launch.test_yarn import Laptop
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
        laptop = Laptop(server, tmp_path)
        where = ("--launcher", "yarn", "--yarn-url", server.url, "--log-dir", "logs", "--connect-timeout", 60)
        words = ["fail", QUOTED, str(tmp_path / "said")]
        code, out, err = laptop.run(*where, "-n", 2, "-s", 1, "program.py", *words)
        assert code == 3, err
        assert {path for method, path, _ in server.requests if method == "POST"} == {"/app/v1/services"}
        assert all(user for _, _, user in server.requests) and not server.services
    logs = tmp_path / "logs"
    said = [(logs / f"worker-{rank}.log").read_text() for rank in (0, 1)]
    assert sorted(text.split(" on ")[1] for text in said) == [f"{host} None {words}\n" for host in HOSTS]
    record = json.loads((logs / "job.json").read_text())
    assert (record["launcher"], record["exit_code"]) == ("yarn", 3)
    assert [each["name"] for each in record["hosts"]] == ["h1", "h2"]
    assert "worker 1 (pid" in err and "exited with code 3" in err and "0 processes left on 2 hosts" in err, err
    assert "worker 0 on h" in out
    assert not (logs / "bridge.json").exists()
    assert not [each for host in HOSTS for each in testbed.processes(host)], os.listdir(tmp_path / "nodes")


class Followed:
    """The command that follows a job, outside of the cluster; `log` and `wait` as those of `launching.Launched`."""

    def __init__(self, laptop: Laptop, words: Sequence[object]):
        self.logs, self.began = laptop.folder / "logs", time.monotonic()
        self._out, self._err = laptop.folder / "command.out", laptop.folder / "command.err"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = laptop.start(*words, stdout=out, stderr=err)

    @property
    def record(self) -> dict:
        return json.loads((self.logs / "job.json").read_text())

    def log(self, name: str) -> str:
        path = self.logs / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def wait(self) -> Result:
        self.process.wait(LONGEST)
        return Result(
            self.process.returncode, self._out.read_text(), self._err.read_text(), time.monotonic() - self.began
        )


@dataclass
class Engine(engines.Engine):
    """See `tests.cluster.engines`. The launcher's container is on h5."""

    server: Yarn
    bed: Testbed
    laptop: Laptop
    name = "yarn"

    @property
    def testbed(self) -> Testbed:
        return self.bed

    def job(self, *arguments: object) -> Followed:
        where = ("--launcher", "yarn", "--yarn-url", self.server.url, "--log-dir", "logs", "--connect-timeout", 60)
        return Followed(self.laptop, (*where, "--job", "train", *arguments))

    def script(self, text: str) -> Path:
        path = self.laptop.folder / "program.py"
        path.write_text(text)
        return path

    def start(self, fault: str) -> Followed:
        job = self.job("-n", 2, "-s", 0, self.script(engines.PROGRAM).name)
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
        yield Engine(server, testbed, Laptop(server, tmp_path))


class TestContract(engines.Contract):
    """Of YARN."""
