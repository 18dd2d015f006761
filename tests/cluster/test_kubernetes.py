"""Jobs in pods of a real Kubernetes, on a test bed's hosts; kubelet.py says what of a kubelet is there.

All tests share one cluster, which takes seconds to start: each job has a name of its own, and leaves nothing.
"""

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.cluster import engines
from tests.cluster.conftest import made_bed
from tests.cluster.kubernetes import Kubernetes, folder, missing
from tests.cluster.launching import LONGEST, Front, Launched
from tests.copied_tree import search_path
from tests.forked_job import KUBERNETES, forked
from tests.launch.conftest import LAST
from tests.waiting import wait_for

pytestmark = pytest.mark.timeout(800)  # with the start of the cluster
TEMPLATE = "pod.yaml"
GRACE_SECONDS = 4


@pytest.fixture(scope="module")
def kubernetes(needs_testbed: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kubernetes]:
    if lacking := missing():
        pytest.skip(f"no Kubernetes: it needs {lacking}")
    pytest.importorskip("kubernetes", reason="pip install 'dmltrain[kubernetes]'")
    with made_bed("_k", tmp_path_factory) as bed:
        made = Kubernetes(bed, tmp_path_factory.mktemp("kubernetes") / "cluster")
        made.start()
        yield made


class Pods(Front):
    """A front door whose jobs run in pods, as the user `user` of the cluster."""

    backend = KUBERNETES

    def __init__(self, kubernetes: Kubernetes, folder: Path, user: str = "admin"):
        super().__init__(kubernetes.testbed, folder)
        self.kubernetes = kubernetes
        self.environment["KUBECONFIG"] = str(kubernetes.kubeconfig(user))
        container = {"workingDir": str(folder), "env": [{"name": "PYTHONPATH", "value": search_path()}]}
        spec = {"terminationGracePeriodSeconds": GRACE_SECONDS, "containers": [container]}
        (folder / TEMPLATE).write_text(yaml.safe_dump({"spec": spec}))

    def words(self, name: str, *arguments: object, image: str = "registry/train:1") -> list[object]:
        options = ("--launcher", "kubernetes", "--image", image, "--kube-template", TEMPLATE, "--job", name)
        return [*options, "--connect-timeout", 300, *arguments]

    def job(self, name: str, *arguments: object, **more: object) -> Launched:
        return self.start(*self.words(name, *arguments), logs=name, **more)

    def wait_gone(self, name: str) -> None:
        """Nothing of the job is left, on hosts or in Kubernetes."""
        engines.wait_gone(self.testbed, lambda: self.kubernetes.objects(name))

    def is_found_followed_and_ended(self, kind: str, pod: str, end: Callable[[Front], None]) -> None:
        """A submitted job, whose launcher is in a pod by such a name."""
        name = "later"
        said = engines.Submitted(
            f"is the {kind} {name} of Kubernetes, in the namespace default",
            rf"^Kubernetes' {kind} {name} in the namespace default is there\nlauncher {pod}-\w+ on h\d: Running\n"
            r"(.*: Running\n){2}",
            f"{name}: Kubernetes' {kind} {name} in the namespace default is there, and has",
            f"there is a {kind} {name} in the namespace default already",
        )
        words = self.words(name, "--submit", "-n", 2, "-s", 0, self.script(engines.PROGRAM))
        engines.is_found_followed_and_ended(self, words, said, end)
        self.wait_gone(name)


@pytest.fixture
def pods(kubernetes: Kubernetes, tmp_path: Path) -> Pods:
    return Pods(kubernetes, tmp_path)


SHOWS = """
import json, os
print("a line", flush=True)
names = ("API_KEY", "SEED", "DMLC_ROLE", "DMLTRAIN_KUBERNETES", "DMLTRAIN_BRIDGE", "DMLTRAIN_SUBMITTED")
with open(f"{os.environ['DMLC_ROLE']}-{os.environ['DMLC_TASK_ID']}.json", "w") as file:
    json.dump({"host": os.uname().nodename, **{name: os.environ.get(name) for name in names}}, file)
"""
SHOWS += LAST


def test_a_job_runs_in_pods_and_leaves_nothing(pods: Pods):
    words = ("-n", 2, "-s", 1, "--worker-cores", 1, "--secret", "API_KEY", "--env", "SEED", pods.script(SHOWS))
    job = pods.job("plain", *words, env={"API_KEY": "hunter2", "SEED": "5"})
    done = job.wait()
    assert done.code == 0, done
    assert "0 processes left on 2 hosts" in done.err
    written = pods.written()
    assert len({written[f"worker-{rank}"]["host"] for rank in (0, 1)}) == 2
    for each in written.values():
        assert (each["API_KEY"], each["SEED"], each["DMLTRAIN_BRIDGE"]) == ("hunter2", "5", None)
    assert (job.log("worker-0"), job.log("worker-1")) == ("a line\n", "a line\n")
    assert (job.record["launcher"], job.record["exit_code"], len(job.record["processes"])) == ("kubernetes", 0, 4)
    assert "hunter2" not in job.out + job.err + (job.logs / "job.json").read_text()
    pods.wait_gone("plain")
    again = pods.ask("--ps", job.logs)
    assert again.code == 0 and "the pods of a job go with its launcher: nothing of the job runs" in again.out, again


@pytest.mark.thorough
def test_a_submitted_job_is_found_followed_and_ended(pods: Pods):
    pods.is_found_followed_and_ended("Job", "later", engines.ends_by_kill)


@pytest.mark.thorough
def test_what_the_dry_run_prints_works_by_hand(pods: Pods, kubernetes: Kubernetes):
    printed = pods.ask(*pods.words("by-hand", "--dry-run", "-n", 1, "-s", 0, pods.script(SHOWS)))
    assert printed.code == 0, printed
    kubernetes.kubectl("create", "-f", "-", told=printed.out)
    kubernetes.kubectl("wait", "--for=condition=complete", "--timeout=60s", "job/by-hand")
    assert "[worker-0] a line" in kubernetes.kubectl("logs", "job/by-hand")
    for line in printed.out.splitlines():
        if found := re.search("kubectl (delete [^`]*)`", line):
            kubernetes.kubectl(*found[1].split())
    pods.wait_gone("by-hand")


@pytest.mark.thorough
def test_files_of_the_working_folder_are_copied_to_all_pods(pods: Pods, tmp_path: Path):
    (tmp_path / "near.py").write_text("text = 'copied'")
    (tmp_path / "data.bin").write_bytes(b"not wanted")
    program = pods.script("import os, near; print(near.text, os.getcwd(), os.path.exists('data.bin'))")
    template = yaml.safe_load((tmp_path / TEMPLATE).read_text())
    del template["spec"]["containers"][0]["workingDir"]
    (tmp_path / TEMPLATE).write_text(yaml.safe_dump(template))
    words = ("--sync-dst-dir", "/tmp/there", "--sync-exclude", "*.bin", "-n", 2, "-s", 0, program.name)
    job = pods.job("copied", *words)
    done = job.wait()
    assert done.code == 0, done
    assert job.log("worker-0") == job.log("worker-1") == "copied /tmp/there False\n"
    (tmp_path / "large").write_bytes(os.urandom(1_100_000))
    refused = pods.job("too-large", *words).wait()
    assert refused.code == 2 and "has 1.1 MB when packed, and Kubernetes takes 1 MB" in refused.err, refused
    pods.wait_gone("copied")


@pytest.mark.thorough
def test_a_launcher_outside_reaches_the_pods_too(pods: Pods):
    done = pods.job("outside", "--launcher-inside", "no", "-n", 2, "-s", 0, pods.script(SHOWS)).wait()
    assert done.code == 0 and "0 processes left on 2 hosts" in done.err, done
    pods.wait_gone("outside")


# -- the queue and what is refused -------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_the_time_in_the_queue_is_said_and_not_counted(pods: Pods, kubernetes: Kubernetes):
    """First nothing has room for the launcher's pod, then a node has for one of the two other pods."""
    kubernetes.kubectl("cordon", *kubernetes.nodes)
    try:
        words = ("--worker-cores", 3, "--start-timeout", 5, "-n", 2, "-s", 0, pods.script(SHOWS))
        job = pods.job("queued", *words)
        wait_for(lambda: "5 node(s) were unschedulable" in job.err, "what the scheduler says", LONGEST)
        kubernetes.kubectl("uncordon", "h1")
        wait_for(lambda: "waiting for 1 of 2 pods: Unschedulable: 0/5 nodes" in job.err, "the launcher's wait", LONGEST)
        time.sleep(max(0.0, 6.0 - (time.monotonic() - job.began)))  # longer than --start-timeout
    finally:
        kubernetes.kubectl("uncordon", *kubernetes.nodes)
    done = job.wait()
    assert done.code == 0 and "Insufficient cpu" in done.err, done


@pytest.mark.thorough
def test_a_job_for_which_there_is_no_room_is_ended_by_a_signal_or_a_limit(pods: Pods):
    job = pods.job("hungry", "--worker-gpus", 3, "-n", 1, "-s", 0, "true")
    wait_for(lambda: "Insufficient nvidia.com/gpu" in job.err, "what the scheduler says", LONGEST)
    limited = pods.job("limited", "--worker-gpus", 3, "--queue-wait", 2, "-n", 1, "-s", 0, "true").wait()
    assert limited.code == 124, limited
    assert re.search(r"Insufficient nvidia.com/gpu.*; gave up after 2 s \(--queue-wait\)", limited.err), limited
    job.process.send_signal(signal.SIGINT)
    assert job.wait().code == 130
    pods.wait_gone("hungry")
    pods.wait_gone("limited")


@pytest.mark.thorough
def test_what_is_wrong_is_said_with_a_fix_and_leaves_nothing(pods: Pods, kubernetes: Kubernetes, tmp_path: Path):
    guest = tmp_path / "guest"
    guest.mkdir()
    away = tmp_path / "away.kubeconfig"
    away.write_text(kubernetes.kubeconfig().read_text().replace(":6443", ":6444"))
    words = ("-n", 1, "-s", 0, "true")
    cases = [
        (pods.job("a", *words, env={"KUBECONFIG": "/none"}), 2, "no way to reach a cluster .*\nset KUBECONFIG"),
        (pods.job("b", *words, env={"KUBECONFIG": str(away)}), 125, "does not answer at https://10.99.0.254:6444: "),
        (Pods(kubernetes, guest, "guest").job("c", *words), 2, '"guest" cannot create .*\n`kubectl auth can-i --list'),
        (pods.job("d", "--kube-namespace", "none", *words), 2, "--kube-namespace none: `kubectl get namespaces`"),
        (pods.job("e", "--kube-context", "none", *words), 2, "no way to reach a cluster .*none"),
        (pods.job("f", "--detach", *words), 2, "use --submit, which returns at once, and leave --detach out"),
    ]
    for job, code, said in cases:
        done = job.wait()
        assert done.code == code and re.search(said, done.err) and "Traceback" not in done.err, done
    assert kubernetes.objects() == []


@pytest.mark.thorough
def test_images_and_quotas_that_let_no_pod_start_are_named(pods: Pods, kubernetes: Kubernetes):
    missing = pods.start(*pods.words("no-image", "-n", 1, "-s", 0, "true", image="registry/missing:1"), logs="no-image")
    kubernetes.kubectl("create", "namespace", "small")
    try:
        kubernetes.kubectl("create", "quota", "few", "--hard=pods=1", "-n", "small")
        wait_for(lambda: "few" in kubernetes.kubectl("get", "quota", "-n", "small"), "the quota")
        there = "serviceaccount/default"
        wait_for(lambda: kubernetes.kubectl("get", there, "-n", "small", check=False) != "", "its account")
        full = pods.job("full", "--kube-namespace", "small", "-n", 1, "-s", 0, "true").wait()
        assert full.code == 2 and "exceeded quota: few" in full.err, full
        assert "--worker-cores, --worker-memory, --worker-gpus" in full.err
    finally:
        kubernetes.kubectl("delete", "namespace", "small", "--wait=false")
    done = missing.wait()
    assert done.code == 2 and "ErrImagePull: registry/missing:1: no such image\nIs --image right" in done.err, done
    pods.wait_gone("no-image")


# -- faults ------------------------------------------------------------------------------------------------------------


def of(kubernetes: Kubernetes, name: str, part: str) -> list[str]:
    """The names of a job's pods."""
    wanted = f"dmltrain/job={name},dmltrain/part={part}"
    return kubernetes.kubectl("get", "pods", "-o", "name", "-l", wanted).split()


@dataclass
class Engine(engines.Engine):
    """See `tests.cluster.engines`."""

    kubernetes: Kubernetes
    front: Pods
    job_name: str
    name = "kubernetes"

    def job(self, *arguments: object) -> Launched:
        return self.front.job(self.job_name, *arguments)

    def cancel(self) -> None:
        self.kubernetes.kubectl("delete", f"job/{self.job_name}", "--wait=false")

    def keeps(self, record: str) -> bool:
        return record.startswith("pod/")

    def name_on(self, node: str) -> str:
        """Of the host's pod there."""
        rows = "custom-columns=N:.spec.nodeName,P:.metadata.name"
        asked = ("get", "pods", "-o", rows, "--no-headers", "-l", f"dmltrain/job={self.job_name},dmltrain/part=hosts")
        return dict(map(str.split, self.kubernetes.kubectl(*asked).splitlines())).get(node, "")

    def restore(self, node: str) -> None:
        self.testbed.boot(node)
        self.kubernetes.start_node(node)

    def records(self) -> list[str]:
        return self.kubernetes.objects(self.job_name)


def delete_pod(part: str) -> engines.Strike:
    def strike(engine: Engine, job: Launched) -> str:
        pod = of(engine.kubernetes, engine.job_name, part)[0]
        engine.kubernetes.kubectl("delete", pod, "--wait=false")
        return pod.removeprefix("pod/")

    return strike


def evict(engine: Engine, job: Launched) -> str:
    """As `kubectl drain` does."""
    pod = of(engine.kubernetes, engine.job_name, "hosts")[0].removeprefix("pod/")
    eviction = {"apiVersion": "policy/v1beta1", "kind": "Eviction", "metadata": {"name": pod, "namespace": "default"}}
    where = f"/api/v1/namespaces/default/pods/{pod}/eviction"
    engine.kubernetes.kubectl("create", "--raw", where, "-f", "-", told=json.dumps(eviction))
    return pod


@pytest.fixture
def engine(pods: Pods, kubernetes: Kubernetes, request: pytest.FixtureRequest) -> Iterator[Engine]:
    made = Engine(kubernetes, pods, re.sub("[^a-z]+", "-", request.node.name.lower()).strip("-")[-40:].strip("-"))
    yield made
    pods.wait_gone(made.job_name)


class TestContract(engines.Contract):
    """Of Kubernetes."""


FAULTS = {
    "launcher's pod deleted": engines.Fault(delete_pod("launcher"), 143),
    "host's pod deleted": engines.Fault(delete_pod("hosts"), 125, "{host}.* its pod was deleted"),
    "host's pod evicted": engines.Fault(evict, 125, "{host}.* its pod was deleted"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_its_own(engine: Engine, fault: str):
    engines.try_fault(engine, fault, FAULTS[fault])


@pytest.mark.thorough
def test_a_job_lives_on_while_the_api_server_is_away(pods: Pods, kubernetes: Kubernetes, tmp_path: Path):
    program = pods.script(
        f"import pathlib, time\nprint('up', flush=True)\nwhile not pathlib.Path({str(tmp_path / 'go')!r}).exists():\n"
        "    time.sleep(0.1)\nprint('down')\n"
    )
    job = pods.job("away", "-n", 2, "-s", 0, program)
    job.wait_for_words("up", "worker-0", "worker-1")
    kubernetes.end("kube-apiserver")
    try:
        wait_for(lambda: "does not answer at https://10.99.0.254:6443" in job.err, "the loss of the API server")
    finally:
        kubernetes.api_server()
        kubernetes.wait_ready()
    (tmp_path / "go").touch()
    done = job.wait()
    assert done.code == 0, done
    assert (job.log("worker-0"), job.log("worker-1")) == ("up\ndown\n", "up\ndown\n"), "no line twice, and none lost"
    pods.wait_gone("away")


@pytest.mark.thorough
def test_deleting_the_pods_is_a_notice_for_an_elastic_job(pods: Pods, kubernetes: Kubernetes, tmp_path: Path):
    words = ("--kv-store", "dist_sync", "--num-epochs", 2000, "--save-period", 2000, "--model-prefix", tmp_path / "m")
    job = pods.job("elastic", "-n", 2, "-s", 1, "--elastic", *forked(engines.DIGITS, *words, *engines.IDLE))
    job.wait_for_words("Train-accuracy", "worker-0")
    kubernetes.kubectl("delete", "job/elastic-hosts", "--wait=false")
    done = job.wait()
    assert done.code == 75, done
    assert re.search(r"the agent on elastic-hosts-\w+ got a notice: asked to leave: worker [01] ", done.err), done
    assert list(tmp_path.glob("m-*.pt")), done
    pods.wait_gone("elastic")


# -- JobSet, whose controller is a stand-in: last, because the cluster has it from here on -----------------------------


@pytest.fixture(scope="module")
def jobset(kubernetes: Kubernetes) -> Kubernetes:
    if not (folder() / "version").exists():
        pytest.skip("this Kubernetes loses fields of custom resources: `make kubernetes` builds a better one")
    kubernetes.add_jobset()
    return kubernetes


@pytest.mark.thorough
def test_a_job_is_a_jobset_where_the_cluster_has_it(pods: Pods, jobset: Kubernetes):
    fails = pods.job("bad", "-n", 2, "-s", 0, pods.script("import os; os._exit(7)", "fails.py"))
    job = pods.job("set", "-n", 2, "-s", 1, "--secret", "API_KEY", pods.script(SHOWS), env={"API_KEY": "hunter2"})
    done, failed = job.wait(), fails.wait()
    assert done.code == 0 and "0 processes left on 2 hosts" in done.err, done
    assert re.match(r"set-hosts-0-\w+$", str(pods.written()["worker-0"]["host"])), pods.written()
    assert (job.log("worker-0"), pods.written()["worker-1"]["API_KEY"]) == ("a line\n", "hunter2")
    assert failed.code == 7, failed
    for name in ("set", "bad"):
        pods.wait_gone(name)


def is_deleted(pods: Pods) -> None:
    pods.kubernetes.kubectl("delete", "jobset/later", "--wait=false")


@pytest.mark.thorough
@pytest.mark.parametrize("end", [engines.ends_by_kill, is_deleted])
def test_all_of_a_jobset_goes_with_it(pods: Pods, jobset: Kubernetes, end: Callable[[Front], None]):
    pods.is_found_followed_and_ended("JobSet", "later-launcher-0", end)
