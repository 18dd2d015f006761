"""A real Slurm on the hosts of a test bed: slurmctld and munge on `login`, slurmd on each other host.

Its configuration, and munge's socket, are in every host's own /etc/slurm only. A host that does not answer is down
after 10 s, not 300.
"""

import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.cluster.layout import LOGIN
from tests.cluster.testbed import Testbed
from tests.waiting import wait_for

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "salloc")  # Debian: munge, slurmctld, slurmd, slurm-client
GRACE_SECONDS = 20  # between the signal and the end of a job of the partition `warned` that gives way
CONFIGURATION = """
ClusterName=testbed
GresTypes=gpu
SlurmctldHost=login
AuthType=auth/munge
AuthInfo=socket=/etc/slurm/munge.socket
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
SlurmdTimeout=10
SlurmctldTimeout=10
KillWait=3
MessageTimeout=30
SlurmdParameters=config_overrides
NodeName=h[1-{last}] CPUs=4 RealMemory=2000 Gres=gpu:2 State=UNKNOWN
SchedulerParameters=bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE
PartitionName=warned Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace}
PartitionName=staff Nodes=ALL MaxTime=INFINITE State=UP AllowGroups=root
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""
# Nothing here uses cgroups; without this line slurmd looks for those of systemd and gives up.
CGROUPS = "CgroupPlugin=cgroup/v1\n"
GPUS = "Name=gpu File=/dev/null,/dev/zero\n"  # two on each host, which are none


def missing() -> str:
    """What this machine lacks, in a few words; "" when it has everything."""
    path = "/usr/sbin:/usr/bin:/sbin:/bin"
    lacking = [program for program in PROGRAMS if not shutil.which(program, path=path)]
    return f"{', '.join(lacking)} (Debian's packages slurmctld, slurmd, slurm-client, munge)" if lacking else ""


class Slurm:
    """Started by `start`. All its processes are the hosts' own guests: the test bed's `sweep` ends them."""

    def __init__(self, testbed: Testbed, folder: Path):
        self.testbed, self.folder = testbed, folder
        self.nodes = [host for host in testbed.hosts if host != LOGIN]

    def start(self) -> None:
        (self.folder / "state").mkdir(parents=True)
        self.folder.chmod(0o755)
        text = CONFIGURATION.format(folder=self.folder, last=len(self.nodes), grace=GRACE_SECONDS)
        (self.folder / "slurm.conf").write_text(text.lstrip())
        (self.folder / "cgroup.conf").write_text(CGROUPS)
        (self.folder / "gres.conf").write_text(GPUS)
        key = self.folder / "munge.key"
        key.write_bytes(b"a key of tests, which protects nothing " * 4)
        key.chmod(0o400)
        self._bind(LOGIN)
        munged = ["munged", f"--key-file={key}", f"--socket={self.folder}/munge.socket", "--num-threads=2"]
        munged += [f"--{name}-file={self.folder}/munged.{name}" for name in ("pid", "log", "seed")]
        self.on(LOGIN, [*munged, "--force"])
        self.on(LOGIN, ["slurmctld", "-c"])
        for node in self.nodes:
            self.start_node(node)
        self._wait_idle()

    def repair(self) -> None:
        """Have slurmd on each host. Jobs are numbered anew from here on, for `number`."""
        for node in self.nodes:
            if not any(process.name == "slurmd" for process in self.testbed.processes(node)):
                self.start_node(node)
        self._wait_idle()
        found = re.search(r"NEXT_JOB_ID\s+= (\d+)", self.on(LOGIN, ["scontrol", "show", "config"]))
        assert found
        self._first = int(found[1])

    def number(self, place: int) -> str:
        """Slurm's number of the first (1), second, ... job since `repair`."""
        return str(self._first + place - 1)

    def start_node(self, node: str) -> None:
        """slurmd on one host, also after the test bed's `boot`."""
        (self.folder / node).mkdir(exist_ok=True)
        self._bind(node)
        self.on(node, ["slurmd"])

    def _bind(self, host: str) -> None:
        script = 'umount /etc/slurm 2> /dev/null; mount --bind "$0" /etc/slurm'
        self.on(host, ["sh", "-c", script, str(self.folder)])

    def _wait_idle(self) -> None:
        asks = ["sinfo", "-h", "-N", "-p", "debug", "-t", "idle", "-o", "%N"]
        wait_for(lambda: self.on(LOGIN, asks).split() == self.nodes, lambda: self.on(LOGIN, ["sinfo", "-N", "-l"]))

    def on(self, host: str, argv: Sequence[str]) -> str:
        """The output of a command, which must succeed."""
        ran = self.testbed.run(host, argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, capture_output=False)
        assert ran.returncode == 0, f"{argv} on {host}: {ran.returncode}: {ran.stdout}"
        return ran.stdout

    def queue(self) -> list[str]:
        """The ids of the jobs that Slurm has."""
        return self.on(LOGIN, ["squeue", "-h", "-o", "%i"]).split()
