"""Frames and control messages survive encoding and decoding. Anything else is a FrameError with what was expected."""

import json
import math
import tracemalloc
import zlib
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dmltrain.kvstore import codec
from dmltrain.kvstore.server.declared import MAX_SLICES
from dmltrain.kvstore.transport import flat, wire
from dmltrain.kvstore.transport import message as m
from dmltrain.kvstore.transport.message.changes import Change, Changed, Stops, Took
from dmltrain.kvstore.transport.message.data import Declare, DeclaredKey, Error, Hold, Leave, Optimizer
from dmltrain.kvstore.transport.message.handshake import Accept, Challenge, Hello, Proof, Refuse
from dmltrain.kvstore.transport.message.job import (
    Abort,
    Barrier,
    Bye,
    Heartbeat,
    LinkEnd,
    LinkLost,
    NewServer,
    Overdue,
    Register,
    Release,
    ServerAddress,
    Shutdown,
    Start,
    WorkerAddress,
)
from dmltrain.kvstore.transport.message.views import (
    Admit,
    Enter,
    Failed,
    Finished,
    Flush,
    Flushed,
    HasState,
    Invite,
    Leaving,
    Left,
    Ready,
    Rejoin,
    Speed,
    Superseded,
)
from dmltrain.kvstore.transport.wire import HEADER_SIZE, MAX_CONTROL, Flag, FrameError, FrameKind, Header, VersionError
from dmltrain.kvstore.view import Balancing, Lost, View

EXAMPLES = [
    Hello("job", "relay", 3, "server 1", "data", "plain", "00ff"),
    Challenge("00", "11"),
    Proof("22"),
    Accept(),
    Refuse("no"),
    Register("10.0.0.1", 65535, "node7", "dmltrain-1", "boot 1"),
    Heartbeat(),
    Barrier("1"),
    Release("1"),
    Bye(),
    Abort("disk full"),
    Overdue("round 3 has waited 600 s"),
    LinkLost(LinkEnd("relay", 2, "h2", "10.0.0.2:40000"), LinkEnd("server", 1, "h3", "10.0.0.3:9"), "timed out", True),
    Shutdown(),
    Ready(
        {"network": "mlp"},
        (View(1, 0, ((0, 2), (1,)), (0,), until=7), View(2, 7, ((0,),), (0,), lost=(Lost(2, "end"),))),
        Balancing(64, 0, 1.5),
    ),
    Flush(1, 2, -1),
    Flushed(1, 2, 7, met=True),
    Enter(
        View(
            *(2, 7, ((0,), (3, 1)), (0, 1)),
            joined=(3,),
            left=(Lost(2, "SIGTERM"),),
            joined_servers=(1,),
            hands_over=(1,),
        ),
        returns=True,
        holds=True,
        ends="1 is left",
        new_servers=(NewServer(1, ServerAddress("10.0.0.3", 9, "m", "c", "h3")),),
    ),
    Invite((1, 2)),
    Admit(3),
    Leaving("SIGTERM", residuals=True),
    Left(3, 1, 24),
    Speed(3, 812.5),
    HasState(3),
    Rejoin(
        Register("10.0.0.1", 9, "node7", "dmltrain-1", "boot 1"),
        Start((ServerAddress("10.0.0.1", 9, "", "a"),), (WorkerAddress("", "a"),)),
        (Enter(View(2, 7, ((0, 2),), (0,)), holds=True),),
        (Ready({"network": "mlp"}),),
        (Finished(2, 24),),
    ),
    Superseded(2),
    Failed("RuntimeError: out of memory", 6),
    Change(2, "dist_ssp", 4.0, "dmltrain job set", 121),
    Stops(2, 121, "no"),
    Changed(2, "kv_store=dist_ssp staleness=4"),
    Took(0.25),
    Hold(7),
    Start(
        (ServerAddress("10.0.0.1", 9, "", "a"), ServerAddress("10.0.0.2", 9, "m", "b")),
        (WorkerAddress("", "a"),),
        {"ps-lite": 9100},
        (0,),
        (NewServer(1, ServerAddress("10.0.0.3", 9, "m", "c", "h3")),),
    ),
    Declare(
        "dist_async",
        math.inf,
        (DeclaredKey(1 << 31, "w", "float32", True, {"type": "topk", "ratio": 0.1}, ((0, 65536), (1, 7))),),
    ),
    Optimizer({"name": "sgd", "lr": 0.1, "keys": {"0": {}}}),
    Leave(24),
    Error("why"),
]
KINDS = sorted({int(each.kind) for each in EXAMPLES})


def sent(content, kind=FrameKind.CONTROL):
    return m.decode(kind, json.dumps(content).encode())


def content_of(value):
    """The JSON object that it is sent as."""
    return json.loads(m.encode(value)[HEADER_SIZE:])


DECLARED_KEY = content_of(next(each for each in EXAMPLES if type(each) is Declare))["keys"][0]
VIEW = content_of(next(each for each in EXAMPLES if type(each) is Enter))["view"]
READY = content_of(next(each for each in EXAMPLES if type(each) is Rejoin))["ready"][0]


@pytest.mark.parametrize("value", EXAMPLES, ids=lambda value: type(value).__name__)
def test_messages_survive_encoding_and_decoding(value):
    frame = m.encode(value, view=3)
    header = Header.unpack(frame[:HEADER_SIZE])
    assert (header.kind, header.length, header.view) == (value.kind, len(frame) - HEADER_SIZE, 3)
    assert Header.unpack(m.encode(value)[:HEADER_SIZE]).view == 0
    assert m.decode(header.kind, frame[HEADER_SIZE:]) == value


@pytest.mark.parametrize(
    "of, changed, said",
    [
        (Optimizer, {"more": 1}, "OPTIMIZER: it has the unknown field 'more', expected spec"),
        (Bye, {"op": "sing"}, "op is 'sing', expected one of .*register, heartbeat"),
        *((Bye, {"op": each}, "op is .*, expected one of .*register") for each in (None, ["barrier"])),
        *((Register, {"port": each}, f"register: port is {each}, expected .* 0 to 65535") for each in (70000, True)),
        *((Speed, {"samples": each}, f"speed: samples is {each}, .* positive") for each in (0, math.nan, math.inf)),
        *((Took, {"seconds": each}, f"took: seconds is {each}, .* positive") for each in (0, -1)),
        *((Hello, {"role": each}, f"HELLO: role is '{each}', expected one of sch.* relay") for each in ("king", "")),
        *((Hello, {"index": each}, "HELLO: index is .*, expected .* >= 0") for each in (-1, True, "1", None)),
        (Hold, {"step": -1}, "HOLD: step is -1"),
        (Rejoin, {"ready": [READY, READY]}, "rejoin: it is wrong: 1 views and 2 times ready, expected 0 or 1"),
        (Enter, {"view": VIEW | {"servers": []}}, "enter: view is wrong: view 2 with servers"),
        *((Declare, {"staleness": each}, "staleness is .*, expected a number") for each in ("x", math.nan)),
        (Declare, {"keys": [DECLARED_KEY | {"weight": 1}]}, r"DECLARE: keys\[0\].weight is 1, expected true or"),
        (Declare, {"keys": [DECLARED_KEY | {"slices": [[0, 1, 2]]}]}, r"slices\[0\] is .0, 1, 2., expected .* 2 "),
    ],
)
def test_invalid_values_are_named(of, changed, said):
    with pytest.raises(FrameError, match=said):
        sent({**content_of(next(each for each in EXAMPLES if type(each) is of)), **changed}, of.kind)


def test_a_message_of_many_small_values_is_refused_before_it_takes_memory():
    payload = b'{"type":"dist_sync","staleness":0,"keys":[' + b"[]," * 2_700_000 + b"[]]}"
    assert len(payload) < MAX_CONTROL
    tracemalloc.start()
    try:
        with pytest.raises(FrameError, match="DECLARE: it takes about 411 MiB, expected at most 120"):
            m.decode(FrameKind.DECLARE, payload)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_the_largest_declaration_of_a_server_is_accepted_and_one_with_a_whole_number():
    assert sent({"type": "dist_ssp", "staleness": 3, "keys": []}, FrameKind.DECLARE) == Declare("dist_ssp", 3.0, ())
    slices = tuple((index, 1 << 20) for index in range(MAX_SLICES))
    keys = (DeclaredKey(0, "weight", "float32", True, {"type": "none"}, slices),)
    assert m.decode(FrameKind.DECLARE, m.encode(Declare("dist_sync", 0.0, keys))[HEADER_SIZE:]).keys == keys


def test_an_unexpected_message_or_data_are_named():
    assert m.expect(Bye(), Bye) == Bye()
    with pytest.raises(FrameError, match="Bye where Hello"):
        m.expect(Bye(), Hello)
    with pytest.raises(FrameError, match="frame kind 33"):
        sent({}, FrameKind.PUSH)


PUBLISHED = (
    "register, heartbeat, barrier, release, bye, abort, overdue, link lost, start, shutdown, ready, flush, flushed, "
    "enter, invite, admit, leaving, left, speed, has state, rejoin, superseded, failed, change, stops, changed, took"
)


def test_operations_keep_their_names():
    """They are the protocol's; see docs/protocol.md."""
    found = {name: each.__name__ for name, each in m.BY_OP.items()}
    assert found == {name: name.title().replace(" ", "") for name in PUBLISHED.split(", ")}
    documented = (Path(__file__).parents[2] / "docs/protocol.md").read_text()
    assert [name for name in m.BY_OP if f"| `{name}`" not in documented and f", `{name}`" not in documented] == []


HELLO, CHALLENGE, PROOF = EXAMPLES[:3]


@pytest.mark.parametrize(
    "value, name",
    [(HELLO, "job"), (HELLO, "nonce"), (CHALLENGE, "nonce"), (CHALLENGE, "proof"), (PROOF, "proof")],
    ids=str,
)
def test_texts_of_a_handshake_have_a_limit(value, name):
    """Who sends them has not proved yet to belong to the job."""
    content = content_of(value)
    assert getattr(sent({**content, name: "a" * 512}, value.kind), name) == "a" * 512
    with pytest.raises(FrameError, match=f"{name} is .*, expected a text of at most 512"):
        sent({**content, name: "a" * 513}, value.kind)


GOLDEN = bytes.fromhex(
    "444d4c540a210003"  # DMLT, version 10, PUSH, float32, in shared memory and asking for the value
    "00000003 00000007 00000002"  # view 3, key 7, slice 2
    "000000000000000c 3fb999999999999a 0000000000000400"  # round 12, learning rate 0.1, 1024 bytes
    "0000000000100040 3e800000 3f000000"  # at 1 MiB + 64, waited 0.25 s, worked 0.5 s
    "fffffffe"  # priority -2
)
ABOVE_ALL = max(codec.make({"type": kind}).number for kind in codec.TYPES if kind != "none") + 1


def test_the_layout_is_stable():
    packed = Header(
        FrameKind.PUSH, 1024, 3, 7, 2, 12, 0.1, 0, Flag.SHARED | Flag.PULL, 2**20 + 64, 0.25, 0.5, -2
    ).pack()
    assert packed == GOLDEN + zlib.crc32(GOLDEN).to_bytes(4, "big")
    assert len(packed) == wire.HEADER_SIZE == 68


@given(
    st.sampled_from(list(FrameKind)),
    *[st.integers(0, 2**32 - 1)] * 3,
    st.integers(0, 2**63),
    st.integers(0, 2**63),
    st.floats(allow_nan=False),
    st.integers(0, 6),
    st.integers(0, 3),
    st.integers(0, 2**63),
    *[st.floats(0, 1e6, width=32, allow_subnormal=False)] * 2,
    st.integers(-(2**31), 2**31 - 1),
)
@example(FrameKind.HELLO, 0, 0, 0, 0, 0, 0.0, 0, 0, 0, 1.301045788681166e-38, 0.5, 0)
def test_headers_survive_packing_and_parsing(
    kind, view, key, index, clock, length, number, dtype, flags, offset, waited, worked, priority
):
    header = Header(int(kind), length, view, key, index, clock, number, dtype, flags, offset, waited, worked, priority)
    assert Header.unpack(header.pack()) == header


@given(st.integers(0, 67), st.integers(1, 255))
def test_any_changed_byte_is_refused(position, change):
    damaged = bytearray(Header(FrameKind.PULL, 0, 1, 2, 3, 4).pack())
    damaged[position] ^= change
    with pytest.raises(FrameError):
        Header.unpack(damaged)


@pytest.mark.parametrize(
    "position, value, error, said",
    [
        (4, 8, VersionError, "version 8, expected 10"),
        (5, 250, FrameError, "unknown frame kind 250"),
        (6, ABOVE_ALL, FrameError, f"unknown element type {ABOVE_ALL}"),
        (7, 4, FrameError, "unknown flags 4"),
    ],
)
def test_another_version_and_a_wrong_field_are_named(position, value, error, said):
    body = bytearray(Header(FrameKind.PUSH).pack()[:-4])
    body[position] = value
    with pytest.raises(error, match=said):
        Header.unpack(bytes(body) + zlib.crc32(body).to_bytes(4, "big"))


def test_releases_and_flat_keys_survive_and_those_of_other_sizes_are_refused():
    read = [(7, 0, 2**40), (2**32 - 1, 3, 0)]
    assert list(wire.parse_release(wire.release(read))) == read
    with pytest.raises(FrameError, match="a release of 17 bytes, .* multiple of 16"):
        wire.parse_release(bytes(17))
    packed = flat.declaration((7, 2**32 - 1, 8))[HEADER_SIZE:]
    assert packed.hex() == "00000007ffffffff00000008" and flat.parse(packed) == (7, 2**32 - 1, 8)
    whole = flat.declaration(range(flat.MAX_MEMBERS))[HEADER_SIZE:]
    assert len(flat.parse(whole)) == flat.MAX_MEMBERS and len(whole) == flat.MAX_BYTES
    for wrong in (b"", packed[:-1], whole + whole[:4]):
        with pytest.raises(FrameError, match=f"a flat key of {len(wrong)} bytes, expected 1 to 1024 times 4"):
            flat.parse(wrong)


def test_numbers_of_the_protocol_stay():
    numbered = {
        1: "HELLO CHALLENGE PROOF ACCEPT REFUSE",
        16: "CONTROL DECLARE OPTIMIZER DONE ERROR LEAVE",
        23: "HOLD",
        32: "INIT PUSH PULL VALUE READ_STATE STATE RELEASE PROBE FLAT",
        45: "READ_STEPS READ_GONE",
    }
    expected = {name: n for first, names in numbered.items() for n, name in enumerate(names.split(), first)}
    assert {kind.name: int(kind) for kind in FrameKind} == expected
    assert (Flag.SHARED, Flag.PULL) == (1, 2) and wire.DTYPES == ("float32", "float64")
    assert (wire.MAX_CONTROL, wire.MAX_PROBE, wire.MAX_HELLO) == (8 << 20, 1 << 20, 4096)
    assert (flat.MAX_MEMBERS, flat.MAX_BYTES, flat.FIRST) == (1024, 4 * 1024, 3 << 30)
    assert Header(FrameKind.PULL) == Header(int(FrameKind.PULL), *[0] * (len(Header._fields) - 1)), (
        "unused fields are zero"
    )


@pytest.mark.parametrize(
    "header, followed",
    [
        (Header(FrameKind.PULL), False),
        (Header(FrameKind.PUSH, 1), True),
        (Header(FrameKind.PUSH, 1, flags=Flag.PULL), True),
        (Header(FrameKind.PUSH, 1, flags=Flag.SHARED), False),
        (Header(FrameKind.PUSH, 0, flags=Flag.PULL), False),
    ],
)
def test_a_payload_follows_unless_there_is_none_or_it_is_shared(header, followed):
    assert header.is_followed == followed


def test_documents_state_the_size_of_the_header():
    docs = Path(__file__).parents[2] / "docs"
    assert f"A frame is a header of {HEADER_SIZE} bytes" in (docs / "protocol.md").read_text()
    decision = (docs / "decisions/0002-payload-checksum.md").read_text()
    assert f"the {HEADER_SIZE - 4} bytes before the checksum, of the header's {HEADER_SIZE}, cost nothing" in decision
