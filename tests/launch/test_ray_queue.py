"""Jobs of Ray that a launcher runs in, with a stand-in for the dashboard; what a job asks of Ray, without a cluster."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from dmltrain_launch import LaunchError
from dmltrain_launch.agent.host.cores import engines_limit
from dmltrain_launch.clusters import AllOptions
from dmltrain_launch.clusters.queue import Inside
from dmltrain_launch.clusters.ray import inside, queue, relay
from dmltrain_launch.clusters.ray.hosts import check, hosts_of, merged, request, runtime_env
from dmltrain_launch.clusters.ray.jobs import Absent, Client
from dmltrain_launch.clusters.ray.placement import Node, find, inventory, lacking, names, resources, text_of
from dmltrain_launch.clusters.ray.queue import Held, Queue, dashboard, entrypoint, environment
from dmltrain_launch.commands import jobs
from dmltrain_launch.job.host import Host
from dmltrain_launch.job.job import Setting
from dmltrain_launch.terminal.log_folder import LogFolder
from tests.launch.conftest import ROOT, Launcher
from tests.other_user import OTHER_USER, as_user, python
from tests.waiting import wait_for

pytest.importorskip("ray", reason="pip install 'dmltrain[ray]'")
web = pytest.importorskip("aiohttp.web", reason="pip install 'ray[default]'")
PACKAGE = '{"working_dir": "gcs://_ray_pkg_0.zip"}'  # which is there, so that none is uploaded
BEGIN = inside.BEGIN + "\n"


class Dashboard:
    """Has one job. `printed`: by the job so far; `breaks`: after so many pieces a connection ends, once each."""

    def __init__(self) -> None:
        self.status, self.code, self.printed = "RUNNING", None, BEGIN  # type: str, int | None, str
        self.known, self.refuses, self.breaks = True, False, [0]
        self.asked: list[str] = []
        self.submitted: dict[str, Any] = {}
        self.version: dict[str, str] = {"version": "4", "ray_version": "2.60.0", "ray_commit": "x"}
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),), daemon=True).start()
        self._ready.wait()

    async def _serve(self) -> None:
        app = web.Application()
        app.router.add_route("*", "/api/{path:.*}", self._answer)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        self._end = asyncio.Event()
        self._ready.set()
        await self._end.wait()
        await self._runner.cleanup()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._end.set)

    async def _answer(self, request: Any) -> Any:
        path = request.match_info["path"]
        if path == "version" or path.startswith("packages/"):
            return web.json_response(self.version)
        if path == "jobs/":
            if self.refuses:
                return web.json_response("nothing here", status=404)
            self.submitted = await request.json()
            return web.json_response({"job_id": "a", "submission_id": self.submitted.get("submission_id", "a")})
        what = path.split("/")[-1] if path.count("/") > 1 else {"GET": "info", "DELETE": "delete"}[request.method]
        self.asked.append(what)
        if what == "tail":
            return await self._tail(request)
        if not self.known:
            return web.json_response("no such job", status=404)
        shown = {"type": "SUBMISSION", "entrypoint": "x", "status": self.status, "message": "said\nmore"}
        info = {**shown, "driver_exit_code": self.code, "submission_id": "a"}
        if what == "stop" and self.status == "RUNNING":
            self.printed, self.status = f"{self.printed}last words\n", "STOPPED"
        self.known = what != "delete"
        done = {"stop": {"stopped": True}, "delete": {"deleted": True}}
        return web.json_response({**done, "logs": {"logs": self.printed}, "info": info}[what])

    async def _tail(self, request: Any) -> Any:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        sent, pieces, limit = 0, 0, self.breaks.pop(0) if self.breaks else 0
        while self.known and not (limit and pieces >= limit):
            if sent < len(self.printed):
                piece = self.printed[sent : sent + 7]  # not at the ends of lines
                sent, pieces = sent + len(piece), pieces + 1
                await socket.send_str(piece)
            elif self.status != "RUNNING":
                break
            else:
                await asyncio.sleep(0.02)
        await socket.close()
        return socket


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[Dashboard]:
    monkeypatch.setattr(queue, "MONITOR_SECONDS", 0.0)
    made = Dashboard()
    yield made
    made.close()


def job(url: str, path: Path = Path("/logs"), **more: Any) -> Inside:
    options = AllOptions(launcher="ray", num_workers=1, address=url, ray_runtime_env=PACKAGE, **more)
    return Inside(options, (), "a job", path, ("-n", "1", "true"))


def test_each_line_comes_once_when_connections_end_early(ray: Dashboard):
    ray.breaks = [3, 2, 0]
    ray.printed += "[worker-0] one\n[worker-0] two\n"
    lines = Held("a", ray.url).lines(True, lambda line: None)
    assert [next(lines), next(lines)] == [b"[worker-0] one", b"[worker-0] two"]
    ray.printed += "three\n"
    ray.status, ray.code = "FAILED", 7
    assert list(lines) == [b"three"]
    assert Held("a", ray.url).exit_code() == 7
    assert ray.asked.count("tail") >= 3 and "stop" not in ray.asked


def test_who_follows_a_job_that_is_deleted_is_told(ray: Dashboard):
    lines = Held("a", ray.url).lines(True, lambda line: None)
    ray.printed += "one\n"
    assert next(lines) == b"one"
    ray.known = False
    assert list(lines) == []
    with pytest.raises(LaunchError, match="Ray's job a was deleted while it ran") as caught:
        Held("a", ray.url).exit_code()
    assert caught.value.code == 143
    assert Held("a", ray.url).state() == ["Ray's job a has ended, and is deleted"]


def test_a_dashboard_that_is_away_for_a_moment_is_asked_again(ray: Dashboard, monkeypatch: pytest.MonkeyPatch):
    held, away = Held("a", ray.url), [Absent("away")] * 2
    ray.status, ray.code = "FAILED", -9
    real = held._client.found

    def found(name: str) -> object:
        if away:
            raise away.pop()
        return real(name)

    monkeypatch.setattr(queue, "AWAY_SECONDS", 0.0)
    monkeypatch.setattr(held._client, "found", found)
    assert held.exit_code() == 137 and not away


def test_without_a_launcher_what_ray_says_is_shown(ray: Dashboard):
    ray.printed, ray.status, ray.code = "python: not found\n", "FAILED", 127
    assert list(Held("a", ray.url).lines(False, print)) == [b"python: not found"]
    assert list(Held("a", ray.url).lines(True, print)) == [b"python: not found"]
    assert Held("a", ray.url).state() == ["Ray's job a is FAILED: said"]


def test_a_job_that_does_not_start_in_time_is_given_up(ray: Dashboard):
    ray.status, said = "PENDING", []
    with pytest.raises(LaunchError, match="is PENDING: said; gave up after 0.1 s") as caught:
        list(Held("a", ray.url).lines(True, said.append, 0.1))
    assert caught.value.code == 124
    assert said == ["waiting: Ray's job a is PENDING: said"]


def test_the_address_that_is_given_counts_and_not_that_of_the_environment(ray: Dashboard, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:1")
    submitted = Queue().submit(job(ray.url))
    assert submitted.found_by["ray_address"] == ray.url and os.environ["RAY_ADDRESS"] == "http://127.0.0.1:1"
    assert ray.submitted["submission_id"] == submitted.found_by["ray_job"]
    assert ray.submitted["runtime_env"]["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"] == "15"


def test_what_is_wrong_is_said_without_a_traceback(ray: Dashboard):
    wrong = Inside(AllOptions(ray_runtime_env='{"working_dir": 5}', address=ray.url), (), "a", Path("/logs"))
    with pytest.raises(LaunchError, match="--ray-runtime-env: Ray does not take it"):
        Queue().submit(wrong)
    ray.refuses = True
    with pytest.raises(LaunchError, match=f"Ray at {ray.url} .* 404"):
        Queue().submit(job(ray.url))
    ray.version = {"version": "0.5"}
    with pytest.raises(LaunchError, match=r"gives no answer of Ray \(KeyError"):
        Client(ray.url)
    with pytest.raises(Absent, match="does not answer at http://127.0.0.1:1"):
        Client("http://127.0.0.1:1")
    for given_address in ("h1:6379", "http://", "ray://h1:10001"):
        with pytest.raises(LaunchError, match=f"--address {given_address}: .* expected auto or a URL"):
            dashboard(given_address)
    for record in ({}, {"ray_job": "a b"}, {"ray_job": "a", "ray_address": "x"}):
        with pytest.raises(LaunchError, match="^/q: ray_"):
            Queue().held(record, Path("/q"))


def test_the_command_has_variables_that_are_passed_on_and_no_secrets(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SEED", "5 6")
    monkeypatch.setenv("PYTHONPATH", "/mine")
    settings = (Setting("SEED", "5 6", ""), Setting("PYTHONPATH", "/mine", ""), Setting("OTHER", "x", ""))
    made = entrypoint(job("", settings=settings))
    assert made.startswith("exec env 'SEED=5 6' DMLTRAIN_SUBMITTED=followed ") and "/mine" not in made
    assert made.endswith("--launcher-inside yes --job 'a job' -n 1 true")
    with pytest.raises(LaunchError, match="TOKEN may be secret, and Ray shows the command"):
        entrypoint(job("", settings=(Setting("TOKEN", "x", ""),)))
    given_env = AllOptions(ray_runtime_env='{"env_vars": {"A": "1"}, "excludes": ["x"]}', grace=20.0)
    assert environment(Inside(given_env, (), "a", Path("/logs"))) == {
        "working_dir": ".",
        "excludes": ["x"],
        "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "30", "A": "1"},
    }


def test_what_the_dry_run_prints_works_by_hand(ray: Dashboard, tmp_path: Path):
    words = Inside(job(ray.url).options, (), "a", Path("/logs"), ("sh", "-c", "echo '*' > $HOME \"a\""))
    text = "\n".join(Queue().artefact(words)).replace("python -", f"{sys.executable} -", 1)
    ran = subprocess.run(["sh", "-c", text], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert ray.submitted["entrypoint"] == entrypoint(words)


@pytest.mark.thorough
@pytest.mark.parametrize("moment", ["while the job runs", "when it has ended"])
def test_ctrl_c_stops_the_job_and_keeps_its_last_words(ray: Dashboard, launcher: Launcher, moment: str):
    ray.printed += "[worker-0] one\n"
    inside = ("--launcher", "ray", "--launcher-inside", "yes", "--address", ray.url, "--ray-runtime-env", PACKAGE)
    launched = launcher.start(*inside, "-n", 1, "-s", 0, "true")
    wait_for(lambda: launched.log("worker-0") == b"one\n", "its output")
    if moment == "when it has ended":
        ray.status, ray.code = "FAILED", 3
        wait_for(lambda: "delete" in ray.asked, "the end of the job")
    launched.signal(signal.SIGINT)
    done = launched.wait()
    assert done.out == b"[worker-0] one\n" and "Traceback" not in done.err and not ray.known, done
    if moment == "while the job runs":
        assert done.code == 130 and "last words" in done.err, done
    else:
        assert done.code == 3 and "stop" not in ray.asked, done
    queued = json.loads((launched.logs / "queued.json").read_text())
    assert queued["exit_code"] == done.code and queued["ended"]
    assert [row.state for row in jobs.find_jobs(launcher.folder)] == ["ended"]
    again = LogFolder(launched.logs)
    assert (again.path / "previous-1/worker-0.log").exists(), "the name may be used again"


@given(some.binary().filter(lambda line: b"\n" not in line))
def test_any_line_comes_through_ray(line: bytes):
    text = inside.encoded(line)
    assert "\r" not in text and "\n" not in text
    assert inside.decoded(text.encode()) == line


def test_the_launchers_output_begins_after_rays_own():
    assert list(inside.output_of([b"ray", b"said", inside.BEGIN.encode(), rb"a\\b\r\xe9"])) == [b"a\\b\r\xe9"]
    argv = [sys.executable, "-m", inside.__name__, "--version"]  # a process, as it ignores SIGTERM
    ran = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0 and ran.stdout.startswith(BEGIN + "dmltrain"), ran


# -- what a job asks of Ray --------------------------------------------------------------------------------------------

NODES = [
    Node("a" * 40, "h10", "10.0.0.10", {"CPU": 4.0, "GPU": 2.0, "memory": 8.0 * 2**30}),
    Node("b" * 40, "h2", "10.0.0.2", {"CPU": 8.0}),
    Node("c" * 40, "twin", "10.0.0.3", {}),
    Node("d" * 40, "twin", "10.0.0.4", {}),
]


def test_resources_are_rays_with_units_for_memory():
    assert resources("CPU=8, gpu=2,memory=16g,fast=0.5") == {"CPU": 8, "GPU": 2, "memory": 16 * 2**30, "fast": 0.5}
    assert resources("GPU=0.5") == {"CPU": 1, "GPU": 0.5}
    assert text_of(resources("memory=512m")) == "CPU=1 memory=512m"


@pytest.mark.parametrize("text", ["", "CPU", "=1", "CPU=-1", "CPU=1,cpu=2", "CPU=4g", "GPU=1.5", "CPU=nan", "a=1,"])
def test_wrong_resources_are_refused(text: str):
    with pytest.raises(LaunchError, match="expected"):
        resources(text)


def test_nodes_have_the_names_of_their_hosts():
    named = names(NODES)
    assert list(named) == ["h2", "h10", "twin-cccccccc", "twin-dddddddd"]
    assert find("10.0.0.2", named) is find("h2", named) is NODES[1]
    with pytest.raises(LaunchError, match="h3 is not a node of the Ray cluster, which has h2, h10, twin-c"):
        find("h3", named)


def test_what_a_cluster_can_never_place():
    assert lacking([{"CPU": 4}] * 2, "STRICT_SPREAD", NODES) == ""
    assert lacking([{"CPU": 4}] * 3, "STRICT_SPREAD", NODES).startswith(
        "only 2 of its nodes can take one of the 3 bundle"
    )
    assert lacking([{"CPU": 4}] * 3, "PACK", NODES) == ""
    assert lacking([{"CPU": 1, "GPU": 3}], "PACK", NODES) == "no node has CPU=1 GPU=3"
    assert inventory(names(NODES[:2]), [{"CPU": 1, "GPU": 3}]) == "h2 (CPU=8 GPU=0), h10 (CPU=4 GPU=2)"
    many = names([replace(NODES[0], host=f"n{number}") for number in range(10)])
    assert inventory(many, [{"CPU": 1}]).endswith("n7 (CPU=4), and 2 more")


def test_a_request_has_a_bundle_for_each_worker_node_or_host():
    options = AllOptions(launcher="ray", num_workers=3)
    assert request(options, []).bundles == [{"CPU": 1.0}] * 3
    assert len(request(replace(options, ray_nodes=2), []).bundles) == 2
    asked = request(replace(options, mode="dry-run"), [Host("h1"), Host("h2")])
    assert (asked.hosts, len(asked.bundles), asked.starts, asked.wait) == (["h1", "h2"], 2, False, 5.0)
    with pytest.raises(LaunchError, match="--ray-nodes and a list of hosts exclude each other"):
        request(replace(options, ray_nodes=2), [Host("h1")])
    with pytest.raises(LaunchError, match="--include and --exclude need hosts"):
        hosts_of(replace(options, exclude="h1"))


def test_a_place_becomes_a_host():
    place = {"name": "h1", "ip": "10.0.0.1", "bundles": [0, 2], "python": "/p", "folder": "/w"}
    assert merged(place, {}, True) == Host("h1", hostname="10.0.0.1", python="/p", workdir="/w", slots=2)
    given = {"10.0.0.1": Host("10.0.0.1", python="/mine", slots=5)}
    assert merged(place, given, True) == Host("h1", hostname="10.0.0.1", python="/mine", workdir="/w", slots=5)


def test_a_runtime_environment_is_json_or_a_file(tmp_path: Path):
    file = tmp_path / "env.yaml"
    file.write_text("pip: [einops]\n")
    assert runtime_env(str(file)) == runtime_env('{"pip": ["einops"]}') == {"pip": ["einops"]}
    for wrong, said in ((str(tmp_path / "none"), "No such file"), ("{", "neither JSON"), (str(tmp_path), "directory")):
        with pytest.raises(LaunchError, match=f"--ray-runtime-env .*{said}"):
            runtime_env(wrong)
    file.write_text("- pip\n")
    with pytest.raises(LaunchError, match="expected an object"):
        runtime_env(str(file))


def test_wrong_addresses_and_a_python_without_ray_are_refused():
    with socket.socket() as closed:  # bound, and nobody listens
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        for given, said in (
            (address, f"no Ray cluster at --address {address}: Connection refused; `ray start --head` prints the"),
            ("head", "--address head: expected auto, or HOST:PORT"),
            ("ray://head:10001", "Ray's client is not supported: start the job on a node"),
        ):
            with pytest.raises(LaunchError, match=said):
                check(AllOptions(address=given), installed=lambda name: True)
    with pytest.raises(LaunchError, match=r"Ray is not installed for .*: pip install 'dmltrain\[ray\]'") as missing:
        check(AllOptions(), installed=lambda name: None)
    assert missing.value.code == 127


def test_the_limit_of_an_engine_that_only_counts_cpus():
    assert engines_limit("4 node") == {"engine:node": 4.0}
    assert engines_limit("") == engines_limit("4") == engines_limit("x node") == engines_limit("0 node") == {}


def test_the_relay_prints_what_it_is_told_and_ends_with_its_code():
    name = f"dmltrain-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("\0" + name)
        listener.listen()
        argv = [sys.executable, "-I", "-S", relay.__file__, name, '{"hosts": []}']
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen(argv, env={"DMLTRAIN_BRIDGE": "s"}, **pipes) as one:
            connection, _ = listener.accept()
            with connection, connection.makefile("rw") as stream:
                assert json.loads(stream.readline()) == {"hosts": [], "settings": "s"}
                stream.write('{"said": "h1: lost"}\n{"code": 3}\n')
                stream.flush()
                out, _ = one.communicate()
    assert (one.returncode, out) == (3, "h1: lost\n")
    alone = subprocess.run(argv, env={"DMLTRAIN_BRIDGE": "s"}, capture_output=True, text=True)
    assert alone.returncode == 125 and "the program that talks to Ray has ended" in alone.stderr


def test_the_relay_tells_another_users_process_nothing():
    name = f"dmltrain-test-{os.getpid()}-taken"
    listen = (
        "import socket, sys\nheld = socket.socket(socket.AF_UNIX)\nheld.bind('\\0' + sys.argv[1])\nheld.listen()\n"
        "print('listening', flush=True)\nprint(held.accept()[0].recv(9999))"
    )
    with subprocess.Popen(
        as_user(OTHER_USER, python(), "-I", "-S", "-c", listen, name), stdout=subprocess.PIPE, text=True, cwd="/"
    ) as other:
        assert other.stdout and other.stdout.readline() == "listening\n"
        argv = [sys.executable, "-I", "-S", relay.__file__, name, '{"hosts": []}']
        done = subprocess.run(argv, env={"DMLTRAIN_BRIDGE": "secret"}, capture_output=True, text=True)
        assert other.stdout.read() == "b''\n"
    assert done.returncode == 1 and "another user's process" in done.stderr
