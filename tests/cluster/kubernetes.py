"""A real Kubernetes on the hosts of a test bed: etcd, API server, controller manager and scheduler on `login`, and a
kubelet for tests (kubelet.py) on each other host.

Debian has no package of them, but the source: `make kubernetes` builds them once, into `folder()`.
"""

import base64
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dmltrain_launch import certificate
from tests.cluster import jobset
from tests.cluster.layout import LOGIN
from tests.cluster.testbed import Testbed
from tests.forked_job import KUBERNETES, forked_launcher
from tests.scripts import shell_script

BUILT = ("kube-apiserver", "kube-controller-manager", "kube-scheduler")
PROGRAMS = ("etcd", "kubectl")
PORT = 6443
START_SECONDS = 240.0  # of each part, on a machine that does much else
KUBELET = Path(__file__).with_name("kubelet.py")
ROOT = Path(__file__).parents[2]
USERS = {"admin": "system:masters", "guest": "guests"}  # name: its group; the token is the name
# No others: a server of all takes twice as long to start.
GROUPS = "v1,apps/v1,authentication.k8s.io/v1,authorization.k8s.io/v1,batch/v1,coordination.k8s.io/v1,events.k8s.io/v1,"
GROUPS += "node.k8s.io/v1,policy/v1beta1,rbac.authorization.k8s.io/v1,scheduling.k8s.io/v1,storage.k8s.io/v1,"
GROUPS += "admissionregistration.k8s.io/v1,apiextensions.k8s.io/v1,apiregistration.k8s.io/v1,networking.k8s.io/v1"
ENVIRONMENT = {**os.environ, "GOGC": "400"}  # Go's programs take more memory, and less of a processor
CONTROLLERS = "job,garbagecollector,nodelifecycle,podgc,resourcequota,serviceaccount,root-ca-cert-publisher"


def folder() -> Path:
    """Of the built programs: DMLTRAIN_TEST_KUBERNETES, or a cache of the user."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("DMLTRAIN_TEST_KUBERNETES") or Path(cache, "dmltrain", "kubernetes"))


def missing() -> str:
    """What this machine lacks, in a few words; "" when it has everything."""
    lacking = [program for program in PROGRAMS if not shutil.which(program)]
    if lacking:
        return f"{' and '.join(lacking)} (Debian's packages etcd-server and kubernetes-client)"
    absent = [program for program in BUILT if not os.access(folder() / program, os.X_OK)]
    return f"{', '.join(absent)} in {folder()} (`make kubernetes` builds them)" if absent else ""


class Kubernetes:
    """Started by `start`. All its processes are guests of the hosts: the test bed's `sweep` ends them."""

    def __init__(self, testbed: Testbed, folder: Path):
        self.testbed, self.folder = testbed, folder
        self.nodes = [host for host in testbed.hosts if host != LOGIN]
        self.address = testbed.address(LOGIN)
        self.server = f"https://{self.address}:{PORT}"
        self.running: dict[str, subprocess.Popen[Any]] = {}

    def start(self) -> None:
        self.folder.mkdir(parents=True)
        (self.folder / "keys.pem").write_bytes(certificate.new()[0])
        tokens = "".join(f"{name},{name},{name},{group}\n" for name, group in USERS.items())
        (self.folder / "tokens").write_text(tokens)
        self._write_python()
        self.etcd()
        self.api_server()
        (self.folder / "serving").mkdir(exist_ok=True)
        self._wait(lambda: (self.folder / "serving/apiserver.crt").exists(), "its certificate")
        for user in USERS:
            self._write_kubeconfig(user)
        self.wait_ready()
        for node in self.nodes:
            self.start_node(node)
        self._run("kube-controller-manager", *self._manager())
        self._run("kube-scheduler", f"--kubeconfig={self.kubeconfig()}", "--leader-elect=false")
        self._wait(self._is_whole, "its nodes")

    def _write_python(self) -> None:
        """The images' python3: launchers are forked."""
        command = shlex.join(forked_launcher(backend=KUBERNETES))
        launcher = f'[ "$3" != dmltrain_launch.cli ] || {{ shift 3; exec {command} "$@"; }}'
        shell_script(self.folder / "python3", f'{launcher}\nexec {shlex.quote(sys.executable)} "$@"')

    def etcd(self) -> None:
        url = "http://127.0.0.1:2379"
        options = [f"--listen-client-urls={url}", f"--advertise-client-urls={url}"]
        options += ["--listen-peer-urls=http://127.0.0.1:2380", "--unsafe-no-fsync", f"--data-dir={self.folder}/etcd"]
        self._run("etcd", *options)

    def api_server(self) -> None:
        keys = self.folder / "keys.pem"
        self._run(
            "kube-apiserver",
            *("--etcd-servers=http://127.0.0.1:2379", f"--cert-dir={self.folder}/serving", "--profiling=false"),
            *("--bind-address=0.0.0.0", f"--advertise-address={self.address}", f"--secure-port={PORT}"),
            *(f"--token-auth-file={self.folder}/tokens", "--authorization-mode=RBAC"),
            *("--service-cluster-ip-range=10.96.0.0/16", "--service-account-issuer=https://testbed"),
            *(f"--service-account-key-file={keys}", f"--service-account-signing-key-file={keys}"),
            "--feature-gates=BoundServiceAccountTokenVolume=true",  # as each Kubernetes from 1.21
            f"--runtime-config=api/all=false,{GROUPS.replace(',', '=true,')}=true",
            "--enable-priority-and-fairness=false",
        )

    def _manager(self) -> list[str]:
        return [
            *(f"--kubeconfig={self.kubeconfig()}", "--leader-elect=false", f"--controllers={CONTROLLERS}"),
            *(f"--root-ca-file={self.folder}/serving/apiserver.crt", "--use-service-account-credentials=false"),
            *("--node-monitor-period=1s", "--node-monitor-grace-period=8s", "--kube-api-qps=200"),
            *("--kube-api-burst=400", "--feature-gates=TTLAfterFinished=false"),
        ]

    def start_node(self, node: str) -> None:
        """The kubelet of a host, also after the test bed's `boot`."""
        own = self.folder / node
        own.mkdir(exist_ok=True)
        shutil.copy(self.folder / "keys.pem", own / "kubelet.pem")
        search = f"{self.folder}:{sys.prefix}/bin:/usr/bin:/bin"
        arguments = [self.server, "admin", f"{self.folder}/serving/apiserver.crt", node, self.testbed.address(node)]
        self._start(f"kubelet-{node}", node, [sys.executable, "-S", str(KUBELET), *arguments, str(own), search])

    def add_jobset(self) -> None:
        """The resource and the stand-in for its controller."""
        self.kubectl("create", "-f", "-", told=json.dumps(jobset.CRD))
        self.kubectl("wait", "--for=condition=established", f"crd/{jobset.CRD['metadata']['name']}")
        self._wait(lambda: "jobsets" in self.kubectl("get", "--raw", jobset.PATH, check=False), "its JobSets")
        arguments = [self.server, "admin", f"{self.folder}/serving/apiserver.crt"]
        self.end("kube-controller-manager")  # else its garbage collector looks for new resources after half a minute
        self._run("kube-controller-manager", *self._manager())
        self._start("jobset", LOGIN, [sys.executable, "-S", "-m", "tests.cluster.jobset", *arguments], cwd=str(ROOT))

    def _run(self, name: str, *options: str) -> None:
        self._start(name, LOGIN, [str(folder() / name) if name in BUILT else name, *options])

    def _start(self, name: str, host: str, argv: Sequence[str], cwd: str = "/") -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            more = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "cwd": cwd, "env": ENVIRONMENT}
            self.running[name] = self.testbed.start(host, argv, **more)

    def end(self, name: str) -> None:
        """One of its processes is lost."""
        self.running[name].kill()
        self.running[name].wait()

    def kubeconfig(self, user: str = "admin") -> Path:
        return self.folder / f"{user}.kubeconfig"

    def _write_kubeconfig(self, user: str) -> None:
        ca = base64.b64encode((self.folder / "serving/apiserver.crt").read_bytes()).decode()
        context = {"cluster": "testbed", "user": user, "namespace": "default"}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "testbed",
            "clusters": [{"name": "testbed", "cluster": {"server": self.server, "certificate-authority-data": ca}}],
            "users": [{"name": user, "user": {"token": user}}],
            "contexts": [{"name": "testbed", "context": context}],
        }
        self.kubeconfig(user).write_text(json.dumps(config))

    def wait_ready(self) -> None:
        self._wait(lambda: self.kubectl("get", "--raw", "/readyz", check=False) == "ok", "the API server")

    def _is_whole(self) -> bool:
        ready = self.kubectl("get", "nodes", "--no-headers").split().count("Ready")
        if self.kubectl("get", "nodes", "-o", "jsonpath={.items[*].spec.taints}"):  # those of new nodes, for a moment
            return False
        there = self.kubectl("get", "serviceaccount/default", "configmap/kube-root-ca.crt", "-o", "name", check=False)
        return ready == len(self.nodes) and len(there.split()) == 2

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + START_SECONDS
        while True:
            asked = time.monotonic()
            if condition():
                return
            ended = [name for name, process in self.running.items() if process.poll() is not None]
            if ended or time.monotonic() > end:
                logs = "\n".join((self.folder / f"{name}.log").read_text()[-2000:] for name in ended or self.running)
                raise TimeoutError(f"Kubernetes has not got {what}; ended: {ended}\n{logs}")
            time.sleep(max(0.1, 3 * (time.monotonic() - asked)))  # kubectl takes a second of what the others need

    def kubectl(self, *arguments: str, told: str = "", check: bool = True) -> str:
        """The output of kubectl, run by the administrator."""
        argv = ["kubectl", f"--kubeconfig={self.kubeconfig()}", *arguments]
        ran = self.testbed.run(LOGIN, argv, input=told, stdin=None, env=ENVIRONMENT)
        assert not check or ran.returncode == 0, f"{arguments}: {ran.stderr}"
        return ran.stdout

    def objects(self, name: str = "") -> list[str]:
        """Pods, Jobs and what else a job makes; `name`: only its own."""
        kinds = "pods,jobs,configmaps,secrets,serviceaccounts,roles,rolebindings"
        kinds += ",jobsets" if "jobset" in self.running else ""
        wanted = f"dmltrain/job={name}" if name else "dmltrain/job"
        return self.kubectl("get", kinds, "-o", "name", "-l", wanted).split()
