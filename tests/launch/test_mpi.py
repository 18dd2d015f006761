"""Agents on this machine through real mpiruns, of both kinds."""

import contextlib
import json
import os
import random
import shutil
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from dmltrain_launch import LaunchError
from dmltrain_launch.channels.bridges.bridge import VARIABLE
from dmltrain_launch.clusters import AllOptions
from dmltrain_launch.clusters.mpi.hosts import Cluster
from dmltrain_launch.job.host import Host
from tests.launch.conftest import DEADLINE, carriers
from tests.launch.test_agent import Conversation
from tests.waiting import wait_for

MARK = "DMLTRAIN_TEST_OF_MPI"  # in the environment of every process that a test starts
SLEEP = (sys.executable, "-c", "import time; time.sleep(600)")
ROOT = os.geteuid() == 0


def environment(pid: int) -> dict[str, str]:
    try:
        rows = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    return dict(row.decode(errors="replace").partition("=")[::2] for row in rows)


class Remote(Conversation):
    """An agent behind a channel, with a job of its own."""

    def run(self, *argv: str) -> None:
        """Start task 0."""
        named = {"DMLTRAIN_JOB": self.mark, "PASSWORD": "hush-hush"}
        task = {"task": 0, "argv": argv, "workdir": str(self.folder), "environment": named}
        self.send(do="start", unset=[], tasks=[task])
        self.until("started")

    def finish(self) -> str:
        """End it all properly; how the channel says that the agent ended."""
        assert self.stop()["left"] == []
        return self.lost()

    def lost(self) -> str:
        """What the channel says when it has ended."""
        assert list(self.heard) == []
        return self.channel.close()


class Mpi:
    """One kind of mpirun, and what a test has started with it."""

    def __init__(self, name: str, folder: Path):
        self.name, self.folder = name, folder
        self.arguments = ("--allow-run-as-root",) if ROOT and name == "mpirun.openmpi" else ()
        self.mark = f"test-{os.getpid()}-{random.randrange(10**9)}"
        os.environ[MARK] = self.mark  # which mpirun and the bridges inherit
        self.clusters: list[Cluster] = []

    def cluster(self, *hosts: Host, **options: object) -> Cluster:
        given = {"mpirun": self.name, "mpirun_args": self.arguments, "connect_timeout": DEADLINE, **options}
        self.clusters.append(Cluster(replace(AllOptions(), **given)))
        self.clusters[-1].hosts = list(hosts) or [Host("localhost", python=sys.executable)]
        return self.clusters[-1]

    def talk(self, cluster: Cluster, index: int = 0) -> Remote:
        """With a job for each host: they are one machine, and an agent ends all of its job there."""
        mark = f"{self.mark}-{index}"
        return Remote(self.folder, channel=cluster.connect(cluster.hosts[index], mark), mark=mark)

    @property
    def mpiruns(self) -> list[int]:
        """The pids of the mpiruns that this test has started and that live."""
        own = Path(f"/proc/{os.getpid()}/task").glob("*/children")
        return sorted({int(word) for path in own for word in path.read_text().split()} & self.told().keys())

    def told(self) -> dict[int, str]:
        """Whoever of this test's processes knows what the bridges are told: mpirun, ssh, their shells, the bridges."""
        found = carriers(f"{MARK}={self.mark}")
        return {pid: line for pid, line in found.items() if VARIABLE in environment(pid)}

    def bridges(self) -> dict[int, int]:
        """The pids of the living bridges of this test, by the index of their host."""
        ends = {pid: line.split()[-2:] for pid, line in self.told().items()}
        return {int(words[1]): pid for pid, words in ends.items() if words[:1] == ["dmltrain-bridge"]}

    def left(self) -> dict[int, str]:
        """Processes of this test's jobs and agents."""
        names = ("DMLTRAIN_AGENT", "DMLTRAIN_JOB")
        return carriers(*(f"{name}={self.mark}{end}" for name in names for end in ("", "-0", "-1")))


@pytest.fixture(params=["mpirun.openmpi", "mpirun.mpich"])
def mpi(request, tmp_path) -> Iterator[Mpi]:
    if not shutil.which(request.param):
        pytest.skip(f"{request.param} is missing: install openmpi-bin and mpich")
    made = Mpi(request.param, tmp_path)
    yield made
    for cluster in made.clusters:
        cluster.close()
    wait_for(lambda: not made.told(), "the end of mpirun, ssh and bridges")
    wait_for(lambda: not made.left(), "the end of every process")


def test_two_hosts_share_one_mpirun_and_connect_at_once(mpi):
    cluster = mpi.cluster(Host("localhost"), Host("127.0.0.1"))
    with ThreadPoolExecutor(2) as pool:
        talks = list(pool.map(lambda index: mpi.talk(cluster, index), range(2)))
    wait_for(lambda: len(mpi.mpiruns) == 1, "one mpirun")  # /proc may leave one out while another process ends
    assert len(mpi.bridges()) == 2
    assert talks[0].ready["pid"] != talks[1].ready["pid"]
    assert talks[0].finish() == "exited with 0"
    talks[1].run(*SLEEP)  # the end of one is not that of the other; the end of the cluster ends this


def test_a_process_has_all_cores_and_nothing_of_mpirun_in_its_environment(mpi):
    talk = mpi.talk(mpi.cluster())
    talk.run(sys.executable, "-c", "import json, os; print(json.dumps([[*os.environ], [*os.sched_getaffinity(0)]]))")
    assert talk.until("exited")["code"] == 0
    names, cores = json.loads(talk.printed[0])
    assert not [name for name in names if name.startswith(("OMPI_", "PMIX_", "PMI_", "HYD", VARIABLE))]
    assert set(cores) == os.sched_getaffinity(0)
    talk.finish()


def test_no_secret_is_in_any_command_line_or_in_mpiruns_output(mpi):
    talk = mpi.talk(mpi.cluster())
    talk.run(*SLEEP)
    token = json.loads(environment(mpi.bridges()[0])[VARIABLE])["token"]
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            lines.append(path.read_bytes())
    assert any(b"dmltrain-bridge" in line for line in lines)
    assert not [line for line in lines if token.encode() in line or b"hush-hush" in line]
    os.kill(mpi.bridges()[0], signal.SIGKILL)
    assert token not in talk.lost(), "the message has the output of mpirun"


# -- faults ------------------------------------------------------------------------------------------------------------


def test_mpirun_is_killed_and_the_agent_ends_everything(mpi):
    talk = mpi.talk(mpi.cluster())
    talk.run(*SLEEP)
    (mpirun,) = mpi.mpiruns
    os.kill(mpirun, signal.SIGKILL)
    assert "mpirun was killed by SIGKILL" in talk.lost()
    wait_for(lambda: not mpi.left(), "the end of every process")
    with pytest.raises(OSError):
        talk.channel.write(b"x")


def test_a_killed_bridge_leaves_the_other_hosts_alone_and_another_is_reached_by_an_mpirun_of_its_own(mpi):
    cluster = mpi.cluster(Host("localhost"), Host("127.0.0.1"))
    talks = [mpi.talk(cluster, index) for index in range(2)]
    os.kill(mpi.bridges()[0], signal.SIGKILL)
    assert talks[0].lost().startswith("lost its bridge (pid ")
    first = mpi.mpiruns
    again = mpi.talk(cluster)
    assert set(mpi.mpiruns) - set(first), "another mpirun"
    assert again.finish() == "exited with 0"
    talks[1].run(*SLEEP)
    assert talks[1].finish() == "exited with 0"


# -- mpirun that does not do it ----------------------------------------------------------------------------------------


def refusal(mpi: Mpi, cluster: Cluster) -> LaunchError:
    with pytest.raises(LaunchError) as caught:
        cluster.connect(cluster.hosts[0], mpi.mark)
    return caught.value


def test_a_host_without_that_python_is_named_at_once(mpi):
    error = refusal(mpi, mpi.cluster(Host("localhost", python="/no/such/python"), connect_timeout=1000.0))
    assert "localhost was not reached: mpirun exited with 127" in str(error)
    assert "/no/such/python: not found" in str(error)


@pytest.mark.skipif(not ROOT, reason="only root is refused")
def test_open_mpi_refuses_root_and_the_fix_is_printed(tmp_path):
    if not shutil.which("mpirun.openmpi"):
        pytest.skip("mpirun.openmpi is missing: install openmpi-bin")
    if "OMPI_ALLOW_RUN_AS_ROOT" in os.environ:
        pytest.skip("OMPI_ALLOW_RUN_AS_ROOT is set here")
    mpi = Mpi("mpirun.openmpi", tmp_path)
    mpi.arguments = ()
    cluster = mpi.cluster()
    error = refusal(mpi, cluster)
    cluster.close()
    assert error.code == 2
    assert "--mpirun-args=--allow-run-as-root" in str(error)
