"""Jobs on the nodes of a real Ray cluster, on a test bed's hosts."""

import json
import re
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import forked_job
from tests.cluster import engines
from tests.cluster.conftest import made_bed
from tests.cluster.launching import Front, Launched
from tests.cluster.layout import LOGIN
from tests.cluster.processes import send
from tests.cluster.ray_cluster import DASHBOARD, RayCluster, missing
from tests.copied_tree import search_path
from tests.launch.conftest import LAST

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(600)]  # with the start of the cluster
RAY = ("--launcher", "ray", "--connect-timeout", 300)
SHOWS = """
import json, os
place = f"{os.environ['DMLC_ROLE']}-{os.environ['DMLC_TASK_ID']}"
names = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "GREETING")
others = [name for name in os.environ if name.startswith(("RAY_", "DMLTRAIN_STEP", "DMLTRAIN_BRIDGE"))]
with open(place + ".json", "w") as file:
    json.dump([os.uname().nodename, *map(os.environ.get, names), others, os.getcwd()], file)
"""
SHOWS += LAST


@pytest.fixture(scope="module")
def _cluster(needs_testbed: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    """One for the module: a node takes seconds to start."""
    if lacking := missing():
        pytest.skip(f"no Ray: it needs {lacking}")
    with pytest.MonkeyPatch.context() as patch, made_bed("_ray", tmp_path_factory, hosts=3) as bed:
        patch.setenv("RAY_AUTH_MODE", "disabled")  # else a user's ~/.ray/auth_token turns it on for some processes
        made = RayCluster(bed)
        made.start()
        yield made


@pytest.fixture
def ray(_cluster: RayCluster) -> Iterator[RayCluster]:
    """Whole before each test, and empty after it, whatever the test has left."""
    _cluster.testbed.up()
    _cluster.repair()
    yield _cluster
    end_jobs(_cluster)
    engines.wait_gone(_cluster.testbed, _cluster.left)


class RayFront(Front):
    backend = forked_job.RAY


@pytest.fixture
def front(ray: RayCluster, tmp_path: Path) -> Front:
    return RayFront(ray.testbed, tmp_path)


def end_jobs(ray: RayCluster) -> None:
    """Those of a test that has failed."""
    for _, each in engines.ours(ray.testbed):
        if engines.is_one(each, "dmltrain_launch.cli"):
            send(each.pid, signal.SIGINT)
    for name in ray.submitted():
        ray.job("stop", name)
        ray.job("delete", name)


def test_a_job_gets_nodes_of_its_own_and_divides_their_gpus(ray: RayCluster, tmp_path: Path, front: Front):
    environment = tmp_path / "env.yaml"
    environment.write_text("env_vars:\n  GREETING: hi\n")
    options = ("--ray-nodes", 2, "--ray-resources", "CPU=2,GPU=2", "--ray-runtime-env", environment)
    done = front.run(*RAY, "--address", ray.address, *options, "-n", 3, "-s", 1, front.script(SHOWS))
    assert done.code == 0 and "0 processes left on 2 hosts" in done.err, done
    assert json.loads((tmp_path / "logs/job.json").read_text())["reached_by"]["address"] == ray.address
    written = front.written()
    hosts = {each[0] for each in written.values()}
    assert len(hosts) == 2 and LOGIN not in hosts
    workers = [written[f"worker-{rank}"] for rank in range(3)]
    gpus = [sorted(worker[1] for worker in workers if worker[0] == host) for host in hosts]
    assert sorted(gpus) == [["0", "1"], ["0,1"]]
    assert {each[3] for each in written.values()} == {"hi"}
    assert all(each[4] == [] and each[5] == str(tmp_path) for each in written.values())


def test_who_finds_no_room_is_told(ray: RayCluster, front: Front, engine: "Engine"):
    job = engine.start("", "--ray-resources", "CPU=2", "--hosts", "h1,h3")
    assert {row["host"] for row in job.record["processes"]} == {"h1", "h3"}
    assert len(ray.left()) == 3, "a placement group and two actors"
    full = front.run(*RAY, "--queue-wait", 2, "-n", 2, "true", logs="full")
    assert full.code == 124 and "Ray says NO_RESOURCES after 2 s; others have it" in full.err, full
    assert "waiting: placement_group([{'CPU': 1.0}, {'CPU': 1.0}], strategy='STRICT_SPREAD'): Ray says" in full.err
    packed = front.ask(*RAY, "--dry-run", "--ray-strategy", "PACK", "-n", 2, "-s", 0, "true")
    assert packed.code == 0 and "an actor in each bundle\n  bundle 0, 1 on h2 (10.99.0." in packed.out, packed
    assert packed.out.count("  worker") == 2
    listed = front.ask("--ps", job.logs, "--connect-timeout", 300)
    assert listed.code == 0 and listed.out.count("worker") == 2, listed
    job.process.send_signal(signal.SIGINT)
    assert job.wait().code == 130


def test_what_ray_can_never_place_is_refused_with_what_it_has(ray: RayCluster, front: Front):
    for words, said in (
        (("-n", 9), "only 3 of its nodes can take one of the 9 bundles with CPU=1"),
        (("--ray-resources", "GPU=3", "-n", 1), "no node has CPU=1 GPU=3; the cluster has h1 (CPU=2 GPU=2)"),
        (("--hosts", "h1,h9", "-n", 2), "h9 is not a node of the Ray cluster, which has h1, h2, h3, login"),
    ):
        refused = front.run(*RAY, *words, "true")
        assert refused.code == 2 and said in refused.err, refused


OTHER_VERSION = """
import json, sys, ray
from ray._private import ray_constants
from ray._raylet import GcsClient
gcs = GcsClient(address=sys.argv[1])
where = (b"CLUSTER_METADATA", ray_constants.KV_NAMESPACE_CLUSTER)
found = json.loads(gcs.internal_kv_get(*where))
found["ray_version"] = sys.argv[2] or ray.__version__
gcs.internal_kv_put(where[0], json.dumps(found).encode(), True, where[1])
"""


def test_another_version_than_the_clusters_is_named(ray: RayCluster, tmp_path: Path):
    """The cluster says that it has another one: only what it says is false."""
    say = [sys.executable, "-c", OTHER_VERSION, ray.address]
    ray.on(LOGIN, [*say, "2.7.1"])
    try:
        done = RayFront(ray.testbed, tmp_path).run(*RAY, "-n", 1, "true")
    finally:
        ray.on(LOGIN, [*say, ""])
    assert done.code == 2 and "has Ray 2.7.1 and Python 3." in done.err, done
    assert "use an environment like the cluster's (pip install ray==2.7.1)" in done.err


def test_it_runs_from_ray_job_submit_in_the_working_dir_that_ray_has_copied(ray: RayCluster, tmp_path: Path):
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "program.py").write_text(SHOWS.replace("place +", f'"{tmp_path}/" + place +'))
    words = [str(word) for word in (*RAY, "--log-dir", tmp_path / "logs", "-n", 1, "-s", 0, "program.py")]
    where = ("--working-dir", str(folder), "--runtime-env-json", f'{{"env_vars": {{"PYTHONPATH": "{search_path()}"}}}}')
    printed = ray.job("submit", *where, "--", sys.executable, "-m", "dmltrain_launch.cli", *words)
    assert "0 processes left on 1 host" in printed and "succeeded" in printed, printed
    worker = RayFront(ray.testbed, tmp_path).written()["worker-0"]
    assert "/working_dir_files/" in worker[5], "in the copy of the folder that Ray has made on its node"
    assert worker[2] == "1", "as many threads as the CPUs that Ray has reserved"


def inside(*words: object) -> list[object]:
    """A job whose launcher runs in Ray, asked for from outside."""
    environment = json.dumps({"env_vars": {"PYTHONPATH": search_path()}})
    return [*RAY, "--address", f"http://127.0.0.1:{DASHBOARD}", "--ray-runtime-env", environment, *words]


def test_a_submitted_job_is_found_followed_and_ended(ray: RayCluster, front: Front):
    words = inside("--submit", "-n", 2, "-s", 0, front.script(engines.PROGRAM).name)
    where = r"is Ray's job program\S+, at http://127.0.0.1:8265"
    said = engines.Submitted(where, r"^Ray's job program\S+ is RUNNING.*\n$")
    engines.is_found_followed_and_ended(front, words, said)
    assert ray.submitted() == []


def test_a_launcher_inside_is_followed_to_the_jobs_exit_code(ray: RayCluster, front: Front):
    program = (
        "import os, time\nprint(os.environ['SEED'], flush=True)\nlast = os.environ['DMLC_TASK_ID'] == '1'\n"
        "time.sleep(2 if last else 600)\nos._exit(7)\n"
    )
    words = inside("--launcher-inside", "yes", "--env", "SEED", "-n", 2, "-s", 0, front.script(program).name)
    job = front.start(*words, env={"SEED": "5 6"})
    done = job.wait()
    assert done.code == 7 and re.search(r"worker 1 \(pid \d+ on h\d\) exited with code 7", done.err), done
    assert job.log("worker-0") == job.log("worker-1") == "5 6\n"
    assert (job.record["launcher"], job.record["exit_code"]) == ("ray", 7)
    assert ray.submitted() == []
    printed = front.ask("--dry-run", *words, env={"SEED": "5 6"})
    assert printed.code == 0 and "JobSubmissionClient('http://127.0.0.1:8265')" in printed.out, printed
    cases = [
        (("--launcher-inside", "yes", "--env", "TOKEN=1"), "TOKEN may be secret, and Ray shows the command of a job"),
        (("--submit", "--address", "h1:6379"), "--address h1:6379: to submit a job, expected auto or a URL such as"),
        (("--submit", "--address", "http://127.0.0.1:1"), "dashboard does not answer at http://127.0.0.1:1: "),
        (("--submit", "--ray-runtime-env", '{"working_dir": "/none"}'), "Ray at http://127.0.0.1:8265: .*none"),
    ]
    for number, (options, said) in enumerate(cases):
        refused = front.run(*inside(*options, "-n", 1, "true"), logs=f"refused-{number}")
        assert refused.code in (2, 125) and re.search(said, refused.err) and "Traceback" not in refused.err, refused


def test_an_elastic_job_takes_another_node_and_goes_on_without_it(ray: RayCluster, front: Front):
    job = engines.takes_another_node_and_goes_on_without_it(front, *RAY)
    code, out = front.change(job, "add", "h8")
    assert code == 2 and "h8 is not a node of the Ray cluster" in out, out
    engines.ends_well(front, job)


@dataclass
class Engine(engines.Engine):
    """See `tests.cluster.engines`."""

    ray: RayCluster
    front: Front
    name = "ray"
    options = RAY

    def start(self, fault: str = "", *options: object) -> Launched:
        if fault == "cancelled":  # its launcher is in Ray
            self.options = inside("--launcher-inside", "yes")
        return super().start(fault, *options)

    def launcher(self) -> int:
        [pid] = [each.pid for each in self.testbed.processes(LOGIN) if engines.is_one(each, "dmltrain_launch.cli")]
        return pid

    def cancel(self) -> None:
        (name,) = self.ray.submitted()
        self.ray.job("stop", name, "--no-wait")

    def restore(self, node: str) -> None:
        self.testbed.boot(node)
        self.ray.repair()

    def records(self) -> list[str]:
        return [*self.ray.left(), *self.ray.submitted()]


@pytest.fixture
def engine(ray: RayCluster, tmp_path: Path) -> Engine:
    return Engine(ray, RayFront(ray.testbed, tmp_path))


class TestContract(engines.Contract):
    """Of Ray."""
