"""What an agent keeps for the next launcher, on the bare machines: random schedules of output, events, confirmations
and launchers that are killed at any moment."""

import random
from pathlib import Path

import pytest

from launch.agent.attach import Lease
from launch.agent.protocol import EVENT, HEADER, NO_TASK, OUTPUT
from launch.agent.spool import Left, Spool
from launch.run.journal import Kept
from launch.run.stream import Stream


class Killed(Exception):
    pass


def split(data: bytes) -> tuple[list[tuple[int, int, bytes]], bytes]:
    """Whole frames (kind, task, content), and what is left."""
    found = []
    while len(data) >= HEADER.size:
        kind, task, length = HEADER.unpack_from(data)
        if len(data) < HEADER.size + length:
            break
        found.append((kind, task, data[HEADER.size : HEADER.size + length]))
        data = data[HEADER.size + length :]
    return found, data


class Launcher:
    """Reads frames as a launcher does: output to a log, then its mark; events to a queue, then to the journal. It is
    killed at a random one of these steps. What is on disk is given to the next one."""

    def __init__(self, folder: Path, chance: random.Random, disk: dict, deadly: bool):
        self.chance, self.disk, self.deadly = chance, disk, deadly
        self.kept = Kept(folder)
        self.stream = Stream(disk["seen"])
        self.queue: list[tuple[tuple[int, int], bytes]] = []
        self.data = b""
        for task, log in disk["logs"].items():
            del log[self.kept.size([task]) :]

    def step(self) -> None:
        if self.deadly and self.chance.random() < 0.02:
            raise Killed

    def feed(self, data: bytes) -> None:
        self.data += data
        whole, self.data = split(self.data)
        for frame in whole:
            self.take(*frame)

    def take(self, kind: int, task: int, payload: bytes) -> None:
        number = self.stream.begin()
        self.step()
        if kind == EVENT:
            if self.stream.is_new((number, 0)):
                self.queue.append(((number, 0), payload))
        elif number > self.kept.frame(task):
            log = self.disk["logs"].setdefault(task, bytearray())
            for half in (payload[: len(payload) // 2], payload[len(payload) // 2 :]):
                log += half
                self.step()
            self.kept.put(task, number, len(log))
        self.step()
        self.stream.end()

    def handle(self, most: int) -> None:
        for _ in range(min(most, len(self.queue))):
            number, payload = self.queue.pop(0)
            self.step()
            self.disk["seen"] = number
            self.disk["journal"].append(payload)
            self.step()
            self.stream.wrote(number)


@pytest.mark.parametrize("seed", range(20))
def test_nothing_is_lost_or_doubled_whenever_launchers_are_killed(tmp_path, seed):
    chance = random.Random(seed)
    spool = Spool(str(tmp_path / "spool"), segment=chance.choice([1, 100, 1000]))
    disk = {"seen": (0, 0), "journal": [], "logs": {}}
    sent: dict[int, bytes] = {0: b"", 1: b""}
    events: list[bytes] = []

    def attach(deadly: bool = True) -> Launcher:
        made = Launcher(tmp_path, chance, disk, deadly)
        spool.rewind()
        made.stream.resume(spool.first, spool.last)
        return made

    launcher = Launcher(tmp_path, chance, disk, True)
    for _ in range(400):
        if chance.random() < 0.3:
            events.append(b"event %d" % len(events))
            spool.append(EVENT, NO_TASK, events[-1])
        else:
            task, data = chance.randrange(2), bytes(chance.choices(b"abc\n", k=chance.randrange(1, 60)))
            sent[task] += data
            spool.append(OUTPUT, task, data)
        try:
            if chance.random() < 0.7:
                launcher.feed(spool.read(chance.choice([1, 50, 500])))
            launcher.handle(chance.randrange(3))
            if chance.random() < 0.2:
                spool.confirm(launcher.stream.kept)
        except Killed:
            launcher = attach()
        if chance.random() < 0.02:  # only the connection is lost
            launcher.data = b""
            spool.rewind()
            launcher.stream.resume(spool.first, spool.last)
    if chance.random() < 0.5:  # the agent ends before the last launcher comes
        spool.close()
        spool = Left(spool.folder)
    launcher = attach(deadly=False)
    while data := spool.read(100):
        launcher.feed(data)
    launcher.handle(len(launcher.queue))
    assert disk["journal"] == events
    assert {task: bytes(log) for task, log in disk["logs"].items()} == {
        task: each for task, each in sent.items() if each
    }
    assert launcher.stream.kept == spool.last
    spool.confirm(launcher.stream.kept)
    spool.close()
    assert not Path(spool.folder).exists()


def test_of_all_launchers_the_last_one_has_the_agent():
    for seed in range(200):
        chance, lease, holder = random.Random(seed), Lease(), 0
        for _ in range(20):
            number = chance.randrange(1, 12)
            taken = lease.take(number)
            assert taken == (number > holder)
            holder = number if taken else holder


def frames(spool: Spool) -> list[tuple[int, int, bytes]]:
    return split(b"".join(iter(lambda: spool.read(1), b"")))[0]


def test_above_its_limit_output_is_left_out_and_counted(tmp_path):
    spool = Spool(str(tmp_path / "spool"), most=1000, segment=100)
    for _ in range(20):
        spool.append(OUTPUT, 0, b"x" * 100)
    spool.append(EVENT, NO_TASK, b"event")
    spool.rewind()
    *output, event, note = frames(spool)
    assert len(output) == 9 and event == (EVENT, NO_TASK, b"event")
    assert note[:2] == (OUTPUT, 0) and b"1100 bytes of output are missing here" in note[2]
    spool.confirm(9)
    spool.append(OUTPUT, 0, b"again")
    assert frames(spool) == [(OUTPUT, 0, b"again")]


def test_events_are_kept_without_room_on_the_disk(tmp_path, monkeypatch):
    spool = Spool(str(tmp_path / "spool"))
    spool.append(OUTPUT, 0, b"before")
    (tmp_path / "spool").rename(tmp_path / "away")
    spool.append(OUTPUT, 0, b"12345")
    spool.append(EVENT, NO_TASK, b"one")
    spool.append(EVENT, NO_TASK, b"two")
    (tmp_path / "away").rename(tmp_path / "spool")
    spool.append(OUTPUT, 0, b"after")
    first, one, two, note, last = frames(spool)
    assert (first[2], one[2], two[2], last[2]) == (b"before", b"one", b"two", b"after")
    assert b"5 bytes of output are missing here" in note[2] and b"no room" in note[2]


def test_a_part_of_a_frame_that_a_killed_agent_wrote_is_left_out(tmp_path):
    spool = Spool(str(tmp_path / "spool"))
    spool.append(OUTPUT, 0, b"whole")
    (file,) = (tmp_path / "spool").iterdir()
    with file.open("ab") as more:
        more.write(HEADER.pack(OUTPUT, 0, 100) + b"part")
    left = Left(str(tmp_path / "spool"))
    assert (left.first, left.last, frames(left)) == (1, 1, [(OUTPUT, 0, b"whole")])
