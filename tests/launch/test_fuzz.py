"""Mutated messages of agents, bridges and launchers, and hosts files: each is read or refused, in limited memory and
time (tests/fuzzing.py)."""

import json
import re

import pytest

from dmltrain_launch import LaunchError, channels
from dmltrain_launch.agent import commands, events, protocol
from dmltrain_launch.agent.commands import AnnouncedEntry, Peer, Spawn
from dmltrain_launch.agent.events import StoppedProcess
from dmltrain_launch.agent.host.gpus import Reports
from dmltrain_launch.agent.incoming import Incoming
from dmltrain_launch.agent.protocol import EVENT, HEADER, HELLO, NO_TASK, OUTPUT, ProtocolError
from dmltrain_launch.agent.reports import MADE, Told, Viewed
from dmltrain_launch.channels import ChannelError
from dmltrain_launch.channels.bridges.channel import BridgeChannel, frame
from dmltrain_launch.job import hosts
from tests.fuzzing import Fuzzed, parts, survive

PIECE = 1 << 16  # bytes of one read
ROOT_OF_HOSTS = "hosts.example"
EVENTS = [
    events.Ready("", 1, 2, "/usr/bin/python3", "10.0.0.1", {"cpus": [0, 1], "limits": {}}),
    events.Resumed("", 3, 8, 5, False),
    events.Opened("", "/home/anna/job", ".dmltrain-sync-0"),
    events.Missing("", ("old.py", "a/b"), True),
    events.Wanted("", tuple(range(40)), 1 << 40, True),
    events.Synced("", 3, 4, (1, 2), ("removed a",)),
    events.Probed("", {"os": {"name": "Debian"}, "packages": {"numpy": None}}, -0.25),
    events.Bound("", {"reach": 4000, "scheduler": 0}),
    events.Reached("", {"h2": {"ms": 0.5}, "h3": {"error": "refused"}}),
    events.Measured("", "h2", 10**10, 10**9),
    events.Started("", 3, 4711),
    events.Exited("", 3, -9),
    events.Reported("", 0, Viewed(3, (0, 1, 7))),
    events.Reported("", 0, Told(2, MADE, "kv_store=dist_ssp staleness=4", "from view 3 on")),
    events.Noticed("", (0, 3)),
    events.Frozen("", 3, 60),
    events.Stopped("", (StoppedProcess(5, None), StoppedProcess(6, 3))),
    events.Ended("", (5, 6)),
    events.Refused("", "no space left on h1", 2),
    events.Used("", 0.5, 0.25, 31.5, 10240.0, 0.875, None),
    events.Used("", None, None, 0, 0),
    events.Listing("", ({"pid": 1, "command": ["python", "train.py"]},)),
    events.Alive("", "AAAA"),
]
COMMANDS = [
    commands.JobCommand("mark", "h1", 5.0, 10.0, "00ff", "logs", usage=2.0),
    commands.Attach("mark", "h1", 2, "dmltrain-door", "/tmp/spool"),
    commands.Kept(7),
    commands.Sync("~/job"),
    commands.Same(),
    commands.Entries(
        (AnnouncedEntry(0, "file", "train.py", 0o644, 1, 5, "0" * 64), AnnouncedEntry(1, "link", "l", 0, 1, 0, "x")),
        True,
    ),
    commands.Remove(("old.py",), True),
    commands.File(0, 5),
    commands.Bind("10.0.0.1", True, False, 9000, None),
    commands.Reach((Peer("h2", "10.0.0.2", 4000),)),
    commands.Measure(Peer("h2", "10.0.0.2", 4000)),
    commands.Start(("RANK",), (Spawn(0, ("python", "train.py"), {"A": "b"}, "/tmp", "train.py"),)),
    commands.Scheduler(2, "10.0.0.3", 40000),
    commands.Tell(0, '{"op":"change"}'),
    commands.NoticeCommand((0, 3)),
    commands.Probe({"workdir": "/tmp", "needs": ["torch"]}),
    commands.Stop(5.0, True),
    commands.List("mark"),
    commands.Beat("AAAA"),
]


class Pieces:
    """A channel from which `data` comes."""

    def __init__(self, data: bytes):
        self.data, self.place = data, 0

    def read(self, timeout: float) -> bytes:
        self.place += PIECE
        return self.data[self.place - PIECE : self.place]

    def abort(self) -> None: ...

    def close(self) -> None: ...

    def write(self, data: bytes) -> None: ...


def sent(kind: int, payload: bytes, task: int = NO_TASK) -> bytes:
    return HEADER.pack(kind, task, len(payload)) + payload


def streams() -> list[bytes]:
    """What agents send: a greeting, events and output."""
    frames = [sent(EVENT, protocol.encode_event(each)) for each in EVENTS]
    whole = HELLO + sent(OUTPUT, b"Epoch[0] accuracy=0.5\n", 3).join(frames)
    return [whole, b"Welcome to h1\n" + HELLO + frames[0], *(HELLO + frame for frame in frames)]


def listen(data: bytes) -> None:
    """What the launcher does with the bytes of an agent."""
    for kind, _, payload in channels.frames(Pieces(data), 1.0):
        if kind == EVENT:
            protocol.decode_event(payload, "h1")


def with_lengths(data: bytes) -> bytes:
    """Make the lengths right again: each frame ends where the next object or the data ends."""
    payloads = [b'{"event"' + word for word in data.split(b'{"event"')[1:]]
    return HELLO + b"".join(sent(EVENT, payload[: payload.rfind(b"}") + 1]) for payload in payloads)


def obey(data: bytes) -> None:
    """What an agent does with the bytes of a launcher. It goes on after an error, which is raised at the end."""
    incoming, failed = Incoming(), None
    for start in range(0, len(data), PIECE):
        incoming.feed(data[start : start + PIECE])
        while True:
            try:
                for _ in incoming:
                    pass
                break
            except ProtocolError as error:
                failed = error
    if failed:
        raise failed


def lines() -> list[bytes]:
    each = [protocol.encode_command(command) + b"\0\n}{5" * isinstance(command, commands.File) for command in COMMANDS]
    return [b"".join(each), *each]


def cross(data: bytes) -> None:
    """What the launcher does with the bytes of a bridge."""
    channel = BridgeChannel(Pieces(data), "its bridge", "true", b"", lambda seconds: "")  # type: ignore[arg-type]
    while channel.read(1.0):
        pass
    if channel.close().startswith("lost"):
        raise ChannelError


def bridged() -> list[bytes]:
    last = frame(json.dumps({"code": 0, "said": "all is well"}).encode())
    return [frame(b"hello\n" * 9) + frame(b"x") + frame(b"") + last, frame(b"") + last]


def read_reports(data: bytes) -> None:
    """What an agent does with the bytes of nvidia-smi, in pieces. What it makes of them can be sent."""
    reports = Reports()
    for start in range(0, len(data), 100):
        if reports.trusted:
            reports.feed(data[start : start + 100])
    use = reports.take()
    assert use.busy is None or 0 <= use.busy <= 1
    assert use.memory is None or 0 <= use.memory < 1e15


def reports() -> list[bytes]:
    return [
        b"0, 87, 8012\n1, 3, 11\n" * 8,
        b"0, [N/A], 8012\n",
        b"WARNING: infoROM is corrupted at gpu 0000:00:1E.0\n0, 87, [Not Supported]\n",
    ]


def files() -> list[bytes]:
    with open(ROOT_OF_HOSTS, "rb") as file:
        return [file.read(), b"h1 slots=2 gpus=0-3\nnode[01-08,12]:22 env.A='b c'\n", b"a@[fd00::1]:22 roles=worker\n"]


def inventories() -> list[bytes]:
    return [
        b"defaults: {user: anna, env: {A: info}}\nhosts:\n  - node[01-08] slots=2\n  - name: big\n    gpus: [0, 2]\n",
        b"hosts: [h1, {name: h2, slots: 4, port: 22, roles: [worker]}]\n",
    ]


def read_hosts(data: bytes, name: str) -> None:
    """There are hosts, or a refusal with a line that is there."""
    try:
        found = hosts.parse(data, name)
    except LaunchError as error:
        place = re.match(re.escape(name) + r"(?::(\d+): |: | is )", str(error))
        assert place and error.code == 2, error
        assert 1 <= int(place[1] or 1) <= len(re.split(rb"\r\n|\r|\n|\xc2\x85|\xe2\x80[\xa8\xa9]", data))
        raise
    assert found and all(host.name and re.fullmatch(re.escape(name) + r":\d+", host.where) for host in found)


KEYS = (b'{"event": ', b'{"do": ', b'"host"', b'"task"', b'"bytes"')
WORDS = (*KEYS, b"[[[[", b"{}", b"null", b"\n", b"1e999", b"\\ud800")
HOST_WORDS = (
    b"\xe2\x80\xa8",
    b"\xc3\xa9",
    b"name: ",
    b"slots=",
    b"[1-99999999]",
    b"[",
    b"]",
    b"env.",
    b"&a",
    b"*a",
    b"!!python/object",
    b"- ",
    b"\t",
    b"\xff",
)
AGENT = Fuzzed(listen, streams, (ProtocolError, ChannelError), WORDS, (bytes, with_lengths))
LAUNCHER = Fuzzed(obey, lines, (ProtocolError,), WORDS)
GPUS = Fuzzed(read_reports, reports, (), (b"[N/A]", b", ", b"\n", b"100", b"1e9", b"."))
BRIDGE = Fuzzed(cross, bridged, (ChannelError,), (b'"code"', b"\0\0\0\0", b"{}", b"null"))
HOSTS = Fuzzed(lambda data: read_hosts(data, "hosts"), files, (LaunchError,), HOST_WORDS)
INVENTORY = Fuzzed(lambda data: read_hosts(data, "hosts.yaml"), inventories, (LaunchError,), HOST_WORDS)


@pytest.mark.parametrize("part", parts())
@pytest.mark.parametrize("name", ["AGENT", "LAUNCHER", "GPUS", "BRIDGE", "HOSTS", "INVENTORY"])
def test_every_mutation_is_read_or_refused(name, part):
    survive(f"tests.launch.test_fuzz:{name}", part)
