"""The fault matrix: which fault in which phase of a job on three hosts, and what must come of it. Pure.

h1 has the scheduler, server 0 and worker 0; h2 and h3 have a server and a worker each. Faults of a host are h2's, if
the cell does not say otherwise.
"""

from dataclasses import dataclass

from tests.cluster.layout import LOGIN

PHASES = {
    "before": "two agents are there, h3's is still being started; a process dies in its first instant",
    "start": "all processes run, but the last worker has not joined the job yet",
    "middle": "rounds are under way",
    "exit": "worker 0 has ended, and the others are about to",
}
END_SECONDS = 15.0  # from the fault to the launcher's end
WORK_SECONDS = 25.0  # from the end of a fault that is survived to the end of the job, which has its work still to do
AGENT_SECONDS = 30.0  # from the fault to the end of all processes on a host that the launcher cannot reach

VICTIMS = {"worker": "worker-1", "server": "server-1", "scheduler": "scheduler-0"}
ALL, OTHERS = r"0 processes left on 3 hosts", r"0 processes left on 2 hosts: unknown for {host}"
# h3, whose agent is still being started, may or may not have got the job
SOON = r"0 processes left on (3 hosts|2 hosts: never reached: h3)"
NOBODY = r"0 processes left on 0 hosts: unknown for h1, h2, h3"
NOBODY_YET = r"0 processes left on 0 hosts: unknown for h1, h2; never reached: h3"
ONE = r"0 processes left on 1 host: unknown for {host}; never reached: h3"


@dataclass(frozen=True)
class Expected:
    """Of the launcher: exit code, words about the cause and the last line, both as regular expressions.

    In them {pid} is the victim's pid on its own host, and {host} is the host that the cell is about.
    """

    code: int
    cause: str = ""
    last: str = ALL
    last_before: str = ""  # where it differs in the phase `before`,
    cause_before: str = ""  # or may differ


AGENT = r"the agent on {host} \(pid {pid}\) "
SILENT = (
    r"the agent on {host} \(pid {pid}\) "
    r"(sent no heartbeat for 9.5 s|was lost with its connection \(.*(timed out|Timeout).*\))"
    r"|no heartbeat from {host} for \d+ s: is the host down, or its network cut\?"
)
FAULTS = {
    "worker": Expected(137, r"worker 1 \(pid {pid} on h2\) was killed by SIGKILL"),
    "server": Expected(137, r"server 1 \(pid {pid} on h2\) was killed by SIGKILL"),
    "scheduler": Expected(137, r"scheduler 0 \(pid {pid} on h1\) was killed by SIGKILL"),
    "agent": Expected(125, AGENT + "was killed by", last_before=SOON),
    "session": Expected(125, AGENT + "was lost with its connection", last_before=SOON),
    "sshd": Expected(125, AGENT + "was lost with its connection", OTHERS, ONE),
    "host": Expected(125, SILENT, OTHERS),
    "link": Expected(125, SILENT, OTHERS),
    "healing link": Expected(0),
    "launcher killed": Expected(-9, last=""),
    "launcher cut off": Expected(
        125,
        SILENT.replace("{host}", "h[123]").replace("{pid}", r"\d+"),
        NOBODY,
        NOBODY_YET,
        r"h3 .*(the agent did not start: it was lost with its connection \(.*timed out\)"
        r"|ssh got no answer from h3 within \d+ s)",
    ),
    "Ctrl-C": Expected(130, "the launcher got SIGINT", last_before=SOON),
}
# Faults of the way between two hosts that both reach all others, by the pair of processes that it separates.
CUTS = ("black hole", "silent drop", "large packets dropped")
PAIRS = {"worker-server": ("h2", "h3"), "server-scheduler": ("h2", "h1"), "agent-launcher": ("h2", LOGIN)}
END = r"(worker|server|the relay of worker) \d on {hosts} \(10\.99\.0\.\d:\d+\)"
CONNECTION = rf"the connection between {END} and {END} was lost: "
CUT = {
    "worker-server": Expected(75, CONNECTION.replace("{hosts}", "h[23]")),
    "server-scheduler": Expected(
        75,
        CONNECTION.replace("{hosts}", "h[12]")
        + r"|(server|worker) 1 on h2 missed heartbeats for \d+ s \(.* 10\.99\.0\.2, and .* to the scheduler on h1"
        r"|the scheduler at 10\.99\.0\.1:\d+ missed heartbeats for \d+ s \(.* cut off from (server|worker) 1 on h2",
    ),
    "agent-launcher": Expected(125, SILENT, OTHERS),
}
# what comes of a fault of h3 while its agent is being started
NEVER = r"0 processes left on 2 hosts: never reached: h3"
CONNECTING = {
    "agent": Expected(125, "h3 .*the agent did not start: it was killed by", NEVER),
    "session": Expected(125, "h3 .*the agent did not start: it was lost with its connection", NEVER),
    "host": Expected(125, "h3 .*the agent did not start", NEVER),
    "link": Expected(125, "h3 .*the agent did not start", NEVER),
}
# with the system's ssh, of which the launcher knows what it says and not what became of the agent
CONNECTING_SYSTEM = {
    "agent": Expected(125, "h3 .*ssh failed: it printed nothing; perhaps the remote command was killed", NEVER),
    "session": Expected(125, r"h3 .*ssh failed: Connection to \S+ closed by remote host", NEVER),
    "host": Expected(125, r"h3 .*(the agent did not start|ssh got no answer from h3 within \d+ s)", NEVER),
    "link": Expected(125, r"h3 .*(the agent did not start|ssh got no answer from h3 within \d+ s)", NEVER),
}
# Of faults that look alike to the launcher, or to the agents where the launcher is lost.
KINDS = {
    **dict.fromkeys(VICTIMS, "a process is lost"),
    **dict.fromkeys(("agent", "session", "sshd"), "an agent is lost"),
    **dict.fromkeys(("host", "link"), "a host is silent"),
    **dict.fromkeys(("launcher killed", "launcher cut off"), "the launcher is lost"),
    **{"healing link": "a cut heals", "Ctrl-C": "the user ends the job"},
}
SILENCING = {"host", "link", "launcher cut off"}  # the launcher waits before it believes them


# how the launcher reaches the hosts: the program that it needs, and its options
WAYS = {
    "paramiko": ("", ()),
    "system": ("ssh", ("--ssh", "system")),
    "mpi": ("mpirun.openmpi", ("--launcher", "mpi", "--mpirun", "mpirun.openmpi", "--mpirun-args=--allow-run-as-root")),
    "mpich": ("mpirun.mpich", ("--launcher", "mpi", "--mpirun", "mpirun.mpich")),
}


@dataclass(frozen=True)
class Cell:
    fault: str
    phase: str
    way: str = "paramiko"  # a key of WAYS
    host: str = "h2"
    pair: str = ""  # a key of PAIRS, for a fault of CUTS

    def __str__(self) -> str:
        if self.pair:
            return f"{self.fault}, {self.pair}"
        more = [self.host] * (self.host != "h2") + [self.way] * (self.way != "paramiko")
        return ", ".join([f"{self.fault} {self.phase}", *more])

    @property
    def connecting(self) -> bool:
        """Whether it is about a host whose agent is still being started."""
        return (self.phase, self.host) == ("before", "h3")

    @property
    def expected(self) -> Expected:
        if self.pair:
            return CUT[self.pair]
        if self.connecting:
            return (CONNECTING | CONNECTING_SYSTEM if self.way == "system" else CONNECTING)[self.fault]
        return FAULTS[self.fault]

    @property
    def cause(self) -> str:
        """The launcher's words about it."""
        early = self.expected.cause_before if self.phase == "before" else ""
        return f"{self.expected.cause}|{early}" if early else self.expected.cause

    @property
    def last(self) -> str:
        """The launcher's last line."""
        early = self.expected.last_before if self.phase == "before" else ""
        return early or self.expected.last

    @property
    def unreachable(self) -> set[str]:
        """Hosts whose own agents have to end the job."""
        if self.fault.startswith("launcher"):
            return {"h1", "h2", "h3"}
        return {self.host} if self.fault in ("link", "sshd") or self.pair == "agent-launcher" else set()


# Faults of a host or of its link strike h2 and, in the middle, the scheduler's host and the launcher's; while agents
# are being started over SSH, also the host whose agent is.
ELSEWHERE = {("host", "middle"): ("h1",), ("link", "middle"): ("h1",), ("healing link", "middle"): ("h1", LOGIN)}
SSH = ("paramiko", "system")


def needs_ssh(fault: str, phase: str) -> bool:
    """Whether the fault can be tried over SSH only.

    Once mpirun has started the agents it needs no session of SSH, and none of them is there before the last. When the
    launcher is cut off, a job over mpirun ends 14 to 15 s later: too near to END_SECONDS beside others on few cores.
    """
    return fault in ("session", "sshd", "launcher cut off") or (phase == "before" and fault not in VICTIMS)


ALL_CELLS = [
    *(
        Cell(fault, phase, way, host)
        for fault in FAULTS
        for phase in PHASES
        for way in WAYS
        if way in SSH or not needs_ssh(fault, phase)
        for host in ("h2", *ELSEWHERE.get((fault, phase), ()))
    ),
    *(Cell(fault, "before", way, "h3") for fault in CONNECTING for way in SSH),
]
# by their places in CUTS and PAIRS; each fault and each pair is on the diagonal
CUT_CELLS = [[Cell(fault, "middle", pair=pair) for pair in PAIRS] for fault in CUTS]
# those that wait longest come first, so that the end of them all is not theirs alone
CELLS = sorted(ALL_CELLS, key=lambda cell: cell.fault not in SILENCING)
