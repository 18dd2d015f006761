"""A job in YARN whose containers are on different hosts; `tests/launch/yarn_server.py` says what is YARN's there."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.cluster.layout import LOGIN
from tests.cluster.testbed import Testbed
from tests.launch.test_yarn import Laptop
from tests.launch.yarn_server import yarn

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
        code, out, err = laptop.run(*where, "-n", 2, "-s", 1, "program.py", "fail", QUOTED)
        assert code == 3, err
        assert {path for method, path, _ in server.requests if method == "POST"} == {"/app/v1/services"}
        assert all(user for _, _, user in server.requests) and not server.services
    logs = tmp_path / "logs"
    said = [(logs / f"worker-{rank}.log").read_text() for rank in (0, 1)]
    assert sorted(text.split(" on ")[1] for text in said) == [f"{host} None {['fail', QUOTED]}\n" for host in HOSTS]
    record = json.loads((logs / "job.json").read_text())
    assert (record["launcher"], record["exit_code"]) == ("yarn", 3)
    assert [each["name"] for each in record["hosts"]] == ["h1", "h2"]
    assert "worker 1 (pid" in err and "exited with code 3" in err and "0 processes left on 2 hosts" in err, err
    assert "worker 0 on h" in out
    assert not (logs / "bridge.json").exists()
    assert not [each for host in HOSTS for each in testbed.processes(host)], os.listdir(tmp_path / "nodes")
