"""Mutated frames and states: a server reads or refuses each of them, in limited memory and time (tests/fuzzing.py)."""

import zlib
from types import SimpleNamespace

import numpy as np
import pytest

from dmltrain.kvstore.server import optimizer_state
from dmltrain.kvstore.server.core import ServerCore
from dmltrain.kvstore.server.declared import Rejected
from dmltrain.kvstore.server.links.service import Service
from dmltrain.kvstore.server.links.worker_link import WorkerLink
from dmltrain.kvstore.transport import flat, message, wire
from dmltrain.kvstore.transport.link import Closed, Link
from dmltrain.kvstore.transport.message.data import Declare, DeclaredKey, Optimizer
from dmltrain.kvstore.transport.wire import Flag, FrameError, FrameKind, Header
from tests.archives import repacked
from tests.fuzzing import Fuzzed, parts, survive
from tests.kvstore.served import ENVIRONMENT

KEYS = (
    DeclaredKey(0, "weight", "float32", True, {"type": "none"}, ((0, 4), (1, 3))),
    DeclaredKey(1, "bias", "float32", True, {"type": "2bit", "threshold": 0.5}, ((0, 5),)),
    DeclaredKey(2, "small", "float32", True, {"type": "none"}, ((0, 3),)),
    DeclaredKey(1 << 31, "sum", "float64", False, {"type": "none"}, ((0, 2),)),
)


class Step:
    """An optimizer with one number and one array."""

    def __init__(self, spec: dict, key: int, value: np.ndarray) -> None:
        if spec.get("name") != "sgd" or not isinstance(spec.get("lr"), float):
            raise Rejected(f"unknown optimizer {spec}")
        self.momentum, self.steps = np.zeros_like(value), np.array(0.0)

    def __call__(self, value: np.ndarray, gradient: np.ndarray, rate: float) -> None:
        self.momentum += gradient
        value -= np.float32(0.1) * self.momentum
        self.steps += 1

    def state(self) -> dict[str, np.ndarray]:
        return {"momentum": self.momentum, "steps": self.steps}

    def load(self, found: dict[str, np.ndarray]) -> None:
        self.momentum, self.steps = found["momentum"].copy(), found["steps"].copy()


def made_core() -> ServerCore:
    """What worker 1 has declared; small limits, so that no mutation may take what a real server may."""
    core = ServerCore(2, make_step=Step)
    core.keys.declared.max_bytes = 1 << 16
    core.keys.declare(1, Declare("dist_sync", 0.0, KEYS))
    return core


def stepping_core() -> ServerCore:
    core = made_core()
    core.keys.optimize({"name": "sgd", "lr": 0.5})
    return core


class Stream(Link):
    """A link by which `data` comes, and which sends nowhere."""

    def __init__(self, data: bytes) -> None:
        super().__init__(None)  # type: ignore[arg-type]
        self.data, self.place = data, 0

    def _fill(self, target: memoryview) -> None:
        part = self.data[self.place : self.place + len(target)]
        if len(part) < len(target):
            raise Closed("end of stream")
        target[:] = part
        self.place += len(target)


class Discarding:
    """An outbox that sends nothing, to a worker without shared memory."""

    link = SimpleNamespace(own_arena=None)

    def put(self, *frame: object) -> None:
        pass

    put_all = put


SERVICE = Service("server 0", ENVIRONMENT, ServerCore(2), None, pytest.fail)
SERVICE.answers.outboxes[0] = Discarding()  # type: ignore[assignment]


def converse(data: bytes) -> None:
    """What a server does with the frames of worker 0. Raises FrameError or Rejected."""
    stream = Stream(data)
    SERVICE.shared.core = made_core()
    link = WorkerLink(SERVICE, stream, SERVICE.answers.outboxes[0], "worker", 0)
    try:
        while True:
            link.take(stream.read_header())
    except Closed:
        pass


def frame(kind: FrameKind, payload: bytes = b"", **fields: object) -> bytes:
    return Header(kind, len(payload), **fields).pack() + payload  # type: ignore[arg-type]


def conversations() -> list[bytes]:
    core = stepping_core()
    push = [
        frame(FrameKind.PUSH, np.ones(4, np.float32).tobytes(), clock=1, number=0.5, flags=Flag.PULL),
        frame(FrameKind.PUSH, np.ones(3, np.float32).tobytes(), slice=1, clock=1, number=-1.0),
        frame(
            FrameKind.PUSH,
            bytes(core.slices()[1, 0].push_bytes),
            key=1,
            clock=1,
            dtype=core.slices()[1, 0].codec.number,
        ),
        frame(FrameKind.PUSH, np.ones(2).tobytes(), key=1 << 31, clock=1, dtype=1),
    ]
    declare, optimizer = map(message.encode, (Declare("dist_sync", 0.0, KEYS), Optimizer({"name": "sgd", "lr": 0.5})))
    first = frame(FrameKind.INIT, np.ones(4, np.float32).tobytes())
    small = frame(FrameKind.INIT, bytes(12), key=2)
    number = flat.number((0, 2))
    pushes = [
        frame(FrameKind.PUSH, bytes(4 * 19), key=number, clock=clock, number=0.5, flags=flags)
        for clock, flags in ((1, Flag.PULL), (2, 0))
    ]
    together = [flat.declaration((0, 2)), frame(FrameKind.PULL, key=number), *pushes]
    return [
        declare + first + small + b"".join(together) + frame(FrameKind.RELEASE),
        b"".join(together[:3]) + frame(FrameKind.PUSH, bytes(12), key=2, clock=2) + together[1],
        declare + first + b"".join(push),
        declare + optimizer + b"".join(push) + frame(FrameKind.PULL, clock=1, priority=3),
        frame(FrameKind.PULL) * 3 + frame(FrameKind.PROBE, b"x" * 50) + frame(FrameKind.READ_STATE),
        optimizer + frame(FrameKind.STATE, optimizer_state.pack(core.slices())),
        frame(FrameKind.RELEASE),
    ]


def with_checksums(data: bytes) -> bytes:
    """Make every header's checksum right again, as far as headers follow each other."""
    fixed, place = bytearray(data), 0
    while place + wire.HEADER_SIZE <= len(fixed):
        end = place + wire.HEADER_SIZE
        fixed[place : place + 5] = wire.MAGIC + bytes([wire.VERSION])
        fixed[end - 4 : end] = zlib.crc32(fixed[place : end - 4]).to_bytes(4, "big")
        try:
            header = Header.unpack(fixed[place:end])
        except FrameError:
            break
        place = end + (header.length if header.is_followed else 0)
    return bytes(fixed)


NAMES = ("keys", "slices", "float64", "type", "topk", "int8", "dist_async", "lr")
WORDS = (
    *(f'"{name}"'.encode() for name in NAMES),
    *(b"null", b"[]", b"{}", b"true", b"[[0,1]]", b"2147483648", b"\\ud800"),
    *(bytes([kind]) for kind in FrameKind),
)
FRAMES = Fuzzed(converse, conversations, (FrameError, Rejected), WORDS, (bytes, with_checksums, with_checksums))


def restore(data: bytes) -> None:
    optimizer_state.unpack(data, stepping_core().slices())


def states() -> list[bytes]:
    return [optimizer_state.pack(each.slices()) for each in (made_core(), stepping_core())]


PIECES = (b"PK\1\2", b"PK\3\4", b"PK\5\6", b"<f4", b"|O", b"(3,)", b"True")
STATES = Fuzzed(restore, states, (Rejected,), PIECES, (bytes, repacked))


@pytest.mark.parametrize("part", parts())
@pytest.mark.parametrize("name", ["FRAMES", "STATES"])
def test_nothing_that_arrives_can_break_a_server(name: str, part: int) -> None:
    survive(f"tests.kvstore.test_fuzz:{name}", part)
