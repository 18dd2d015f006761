"""Jobs in YARN, as far as Hadoop's documentation goes: `tests/launch/yarn_server.py` says what that means."""

import json
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dmltrain_launch import LaunchError
from dmltrain_launch.cli import job as job_program
from dmltrain_launch.clusters import AllOptions
from dmltrain_launch.clusters.launcher import Released
from dmltrain_launch.clusters.queue import Inside
from dmltrain_launch.clusters.yarn.api import Absent, Api
from dmltrain_launch.clusters.yarn.hosts import Cluster
from dmltrain_launch.clusters.yarn.queue import Held, Queue, described
from dmltrain_launch.clusters.yarn.service import Described, running, service, service_name, variables, wanted
from dmltrain_launch.job.job import Setting
from tests.cluster.requirements import missing
from tests.launch.conftest import Launcher, Result
from tests.launch.yarn_server import Yarn, beside, wrong, yarn
from tests.waiting import wait_for

PROGRAM = """
import os, pathlib, sys, time
name = f"{os.environ['DMLC_ROLE']} {os.environ['DMLC_TASK_ID']}"
print(name, "on", os.uname().nodename, os.environ.get("CUDA_VISIBLE_DEVICES"), sys.argv[1:], flush=True)
time.sleep(600 if "wait" in sys.argv else 0)
if "fail" in sys.argv:  # worker 1 fails when worker 0 has said its line
    line_said = pathlib.Path(sys.argv[-1])
    if name == "worker 0":
        line_said.touch()
    while not line_said.exists():
        time.sleep(0.02)
    sys.exit(3 if name == "worker 1" else 0)
"""


@pytest.fixture(scope="module")
def needs_containers() -> None:
    if lacking := missing():
        pytest.skip(f"no containers: they need {lacking}")


@pytest.fixture
def server(needs_containers: None, tmp_path: Path) -> Iterator[Yarn]:
    with yarn(tmp_path / "nodes") as made:
        yield made


def by_yarn(server: Yarn) -> tuple[str, ...]:
    """Options of the launcher."""
    return "--launcher", "yarn", "--yarn-url", server.url, "--connect-timeout", "60"


@pytest.fixture
def run(launcher: Launcher) -> Callable[..., Result]:
    """Run the command that gives YARN a job, outside of its cluster."""
    launcher.script(PROGRAM)

    def run(server: Yarn, *words: object) -> Result:
        return launcher.run(*by_yarn(server), "--job", "train", "--host-ip", "127.0.0.1", "--interface", "lo", *words)

    return run


@pytest.mark.thorough
def test_two_containers_on_one_node_are_refused_with_a_fix(needs_containers: None, run: Callable, tmp_path: Path):
    with yarn(tmp_path / "nodes", place=lambda name, index, script: beside(name, 0, script)) as server:
        done = run(server, "-n", 2, "-s", 0, "program.py")
    assert done.code == 2 and "two containers of the job are on one node: the cluster has to obey" in done.err, done
    assert not server.services


@pytest.mark.thorough
def test_a_submitted_job_waits_and_is_found_and_ended(server: Yarn, run: Callable, tmp_path: Path, capsys):
    server.full = True
    done = run(server, "--submit", "-n", 1, "-s", 0, "program.py", "wait")
    assert done.code == 0 and f"dmltrain job ps {tmp_path}/logs" in done.err, done
    assert job_program(["ps", f"{tmp_path}/logs"]) == 0
    assert capsys.readouterr().out == "YARN's service train is ACCEPTED: 0 of 2 containers run\n"
    again = run(server, "--submit", "-n", 1, "true")
    assert again.code == 2 and "logs: YARN's service train is ACCEPTED" in again.err, again
    assert "give another --job" in again.err
    server.go()
    output = tmp_path / "logs/launcher.out"
    wait_for(lambda: output.exists() and "worker 0 on n1" in output.read_text(), "the worker")
    assert job_program(["kill", f"{tmp_path}/logs"]) == 0
    assert "has ended, and is removed" in capsys.readouterr().err
    assert not server.services


@pytest.mark.thorough
def test_a_job_that_gets_no_containers_in_time_is_removed(server: Yarn, run: Callable):
    """None at all, or none but its launcher's, which may itself come late on a busy machine."""
    server.full = True
    done = run(server, "--queue-wait", 2, "-n", 1, "-s", 0, "program.py")
    assert done.code == 124 and "0 of 2 containers run; gave up after 2 s (--queue-wait)" in done.err, done
    server.full = False
    server.place = lambda name, index, script: beside(name, index, script) if name == "launcher" else ["sleep", "60"]
    for seconds in (5, 20, 60):
        done = run(server, "--queue-wait", seconds, "-n", 1, "-s", 0, "program.py")
        assert done.code == 124 and f"gave up after {seconds} s (--queue-wait)" in done.err, done
        assert not server.services
        if "the launcher has not started" not in done.err:
            break
    assert "waiting: 0 of 1 hosts have called; gave up" in done.err, done


def test_what_yarn_refuses_comes_with_a_fix(server: Yarn, run: Callable, tmp_path: Path):
    done = run(server, "--dry-run", "--queue", "default", "-n", 2, "true")
    first, *lines, end, command = done.out.decode().splitlines()
    assert done.code == 0 and first.startswith("mkdir -p ") and end == "END", done
    assert command == "yarn app -launch train 'train.json'"
    made = json.loads("\n".join(lines))
    assert wrong(made, "Service") == "" and made["queue"] == "default" and not server.services
    assert not (tmp_path / "logs").exists()
    done = run(server, "--queue", "nowhere", "-n", 1, "true")
    assert done.code == 2 and "unknown queue: nowhere\n`mapred queue -list` prints the queues" in done.err, done


def job(options: AllOptions, path: Path = Path("/logs"), words: tuple[str, ...] = ("-n", "2", "true")) -> Inside:
    return Inside(options, words, "train", path, words)


OPTIONS = AllOptions(launcher="yarn", num_workers=4, yarn_url="http://rm:8088", job="train")


def test_a_service_has_what_its_hosts_need():
    options = replace(OPTIONS, yarn_hosts=2, worker_memory=2048, server_memory=1024, worker_gpus=1, num_servers=2)
    options = replace(options, settings=(Setting("OMP_NUM_THREADS", "3", "worker"),))
    made = service(Described("train", options, ("a b", "$c"), "/work", "/logs", "/usr/bin/python3", {"PS_X": "1"}))
    assert wrong(made, "Service") == ""
    launcher, host = made["components"]
    assert launcher["launch_command"].endswith("launcher /logs /work 2 2 a%20b %24c")
    assert launcher["configuration"]["properties"] == {"yarn.service.container-state-report-as-service-state": "true"}
    assert (host["number_of_containers"], host["restart_policy"]) == (2, "NEVER")
    gpus = {"yarn.io/gpu": {"value": 2, "unit": ""}}
    assert host["resource"] == {"cpus": 6, "memory": "5120", "additional": gpus}
    assert host["placement_policy"]["constraints"][0]["type"] == "ANTI_AFFINITY"
    assert not {'"', "`"} & set(launcher["launch_command"] + host["launch_command"])


def test_containers_of_all_components_count():
    found = {"components": [{"number_of_containers": 2, "containers": [{}]}, {"number_of_containers": 1}]}
    assert (running(found), wanted(found)) == (1, 3)


def test_names_and_secrets_that_yarn_does_not_take():
    assert service_name("train_cifar10-2026", exact=False) == "train-cifar10-2026"
    assert service_name("9" * 80, exact=False).startswith("j") and len(service_name("9" * 80, exact=False)) <= 55
    with pytest.raises(LaunchError, match="--job Two Words: YARN accepts names of a-z, 0-9 and -.*use --job two-words"):
        service_name("Two Words", exact=True)
    with pytest.raises(LaunchError, match="TOKEN may be secret, and YARN shows the specification"):
        variables(replace(OPTIONS, settings=(Setting("TOKEN", "x", secret=True),)), {"TOKEN": "x"})
    with pytest.raises(LaunchError, match="--yarn-url is missing"):
        described(job(replace(OPTIONS, yarn_url="")))


def test_a_cluster_is_made_inside_only():
    with pytest.raises(Released, match="the containers of a job go with its launcher"):
        Cluster(OPTIONS, [])
    with pytest.raises(LaunchError, match="runs its launcher in YARN only"):
        Cluster(OPTIONS)


def test_a_resourcemanager_that_does_not_answer_and_a_wrong_record(tmp_path: Path):
    with pytest.raises(Absent, match="does not answer at http://127.0.0.1:1: .*refused; is --yarn-url right?"):
        Api("http://127.0.0.1:1", "me").get("train")
    for record, said in (({}, "yarn_service is None"), ({"yarn_service": "a", "yarn_url": "x"}, "yarn_url is 'x'")):
        with pytest.raises(LaunchError, match=f"/q: {said}"):
            Queue().held(record, Path("/q"))


def test_a_launcher_that_never_spoke_is_explained(tmp_path: Path):
    with yarn(tmp_path / "nodes", full=True) as made:
        made.post(service(described(job(OPTIONS, tmp_path))))
        made.services["train"].state = "FAILED"
        held = Held("train", Api(made.url, "me"), tmp_path / "launcher.out")
        assert list(held.lines(True, lambda line: None)) == []
        with pytest.raises(LaunchError, match="is FAILED: 0 of 5 .* its launcher has not said") as caught:
            held.exit_code()
        assert caught.value.code == 125
        del made.services["train"]
        with pytest.raises(LaunchError, match="was removed while it ran") as caught:
            held.exit_code()
        assert caught.value.code == 143


def test_long_output_takes_little_memory_and_all_lines_come(tmp_path):
    count, line = 200_000, b"[worker-0] a line of a program that says much, all day"
    with (tmp_path / "launcher.out").open("wb") as file:
        file.writelines([line + b"\n"] * count)
        file.write(b"dmltrain-exit 3\n")
    held = Held("j", Api("http://127.0.0.1:1", "me"), tmp_path / "launcher.out")
    tracemalloc.start()
    try:
        assert sum(each == line for each in held.lines(False, print)) == count
        assert held.exit_code() == 3
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
