"""Control messages survive encoding and decoding. Anything else is a FrameError with what was expected."""

import contextlib
import json
import math
import re
import tracemalloc
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dmltrain.kvstore.server.declared import MAX_SLICES
from dmltrain.kvstore.transport import message
from dmltrain.kvstore.transport.message import (
    Abort,
    Accept,
    Admit,
    Barrier,
    Bye,
    Challenge,
    Change,
    Changed,
    Consistency,
    Declare,
    Enter,
    Error,
    Failed,
    Finished,
    Flush,
    Flushed,
    HasState,
    Heartbeat,
    Hello,
    Hold,
    Invite,
    Key,
    Leave,
    Leaving,
    Left,
    LinkEnd,
    LinkLost,
    Message,
    NewServer,
    Optimizer,
    Overdue,
    Proof,
    Ready,
    Refuse,
    Register,
    Rejoin,
    Release,
    ServerAddress,
    Shutdown,
    Speed,
    Start,
    Stops,
    Superseded,
    Took,
    WorkerAddress,
    decode,
    encode,
)
from dmltrain.kvstore.transport.wire import HEADER_SIZE, MAX_CONTROL, FrameError, Header, Kind
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
    Consistency("dist_async", math.inf),
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
        (Key(1 << 31, "w", "float32", True, {"type": "topk", "ratio": 0.1}, ((0, 65536), (1, 7))),),
    ),
    Optimizer({"name": "sgd", "lr": 0.1, "keys": {"0": {}}}),
    Leave(24),
    Error("why"),
]
KINDS = sorted({int(each.kind) for each in EXAMPLES})


def sent(content, kind=Kind.CONTROL):
    return message.decode(kind, json.dumps(content).encode())


def test_every_message_has_an_example():
    assert {type(each) for each in EXAMPLES} == {*message.BY_KIND.values(), *message.BY_OP.values()}
    assert set(Message.__subclasses__()) == {type(each) for each in EXAMPLES}


HELLO = vars(Hello("job", "worker", 0, "server 0", "data", "plain", "00"))


@pytest.mark.parametrize("value", EXAMPLES, ids=lambda value: type(value).__name__)
def test_messages_survive_encoding_and_decoding(value):
    frame = message.encode(value, view=3)
    header = Header.unpack(frame[:HEADER_SIZE])
    assert (header.kind, header.length, header.view) == (value.kind, len(frame) - HEADER_SIZE, 3)
    assert Header.unpack(message.encode(value)[:HEADER_SIZE]).view == 0
    assert message.decode(header.kind, frame[HEADER_SIZE:]) == value


@pytest.mark.parametrize("value", [each for each in EXAMPLES if fields(each)], ids=lambda value: type(value).__name__)
def test_a_field_too_many_or_too_few_is_named(value):
    content = json.loads(message.encode(value)[HEADER_SIZE:])
    name = fields(value)[0].name
    with pytest.raises(FrameError, match=f"with an unknown field 'extra', expected the fields .*{name}"):
        sent({**content, "extra": 1}, value.kind)
    del content[name]
    with pytest.raises(FrameError, match=f"without '{name}', expected the fields"):
        sent(content, value.kind)


@pytest.mark.parametrize(
    "kind, content, said",
    [
        (Kind.CONTROL, {"op": "sing"}, "unknown operation 'sing', expected one of register, heartbeat"),
        (Kind.CONTROL, {}, "unknown operation None"),
        (Kind.CONTROL, {"op": ["barrier"]}, "unknown operation ['barrier']"),
        (Kind.CONTROL, {"op": "barrier", "id": 7, "view": 0}, "barrier: id is 7, expected a text"),
        (Kind.CONTROL, {"op": "barrier", "id": None, "view": 0}, "barrier: id is None, expected a text"),
        (
            Kind.CONTROL,
            {"op": "register", "host": "", "port": 70000, "host_name": "", "socket_name": "", "host_id": ""},
            "register: port 70000, expected 0 to 65535",
        ),
        (
            Kind.CONTROL,
            {"op": "register", "host": "", "port": True, "host_name": "", "socket_name": "", "host_id": ""},
            "register: port is True, expected a whole number",
        ),
        (
            Kind.CONTROL,
            {"op": "start", "servers": {}, "workers": [], "facts": {}, "lost": [], "new_servers": []},
            "start: servers is {}, expected a list",
        ),
        (
            Kind.CONTROL,
            {"op": "start", "servers": [7], "workers": [], "facts": {}, "lost": [], "new_servers": []},
            "start: servers is 7, expected an object",
        ),
        (
            Kind.CONTROL,
            {"op": "start", "servers": [], "workers": [], "facts": [], "lost": [], "new_servers": []},
            "facts is [], expected an object",
        ),
        (
            Kind.CONTROL,
            {"op": "speed", "view": 1, "samples": 0},
            "speed of 0.0 samples per second",
        ),
        (Kind.CONTROL, {"op": "speed", "view": 1, "samples": math.nan}, "speed of nan samples per second"),
        (Kind.HELLO, {**HELLO, "role": "king", "index": 0}, "HELLO: role 'king' with index 0"),
        (Kind.HELLO, {**HELLO, "role": "worker", "index": -1}, "HELLO: role 'worker' with index -1"),
        (Kind.PROOF, {"proof": "x" * 513}, "PROOF: proof of 513 characters, expected 512 at most"),
        (Kind.DECLARE, {"type": "dist_sync", "staleness": "x", "keys": []}, "staleness is 'x', expected a number"),
        (
            Kind.DECLARE,
            {"type": "dist_sync", "staleness": 10**400, "keys": []},
            "expected a number that a double can hold",
        ),
        (
            Kind.DECLARE,
            {
                "type": "dist_sync",
                "staleness": 0,
                "keys": [
                    {
                        "key": 0,
                        "name": "a",
                        "dtype": "float32",
                        "weight": 1,
                        "compression": {},
                        "slices": [],
                        "mean": False,
                        "pusher": -1,
                    }
                ],
            },
            "DECLARE: keys: weight is 1, expected true or false",
        ),
        (
            Kind.DECLARE,
            {
                "type": "dist_sync",
                "staleness": 0,
                "keys": [
                    {
                        "key": 0,
                        "name": "a",
                        "dtype": "float32",
                        "weight": True,
                        "compression": {},
                        "slices": [[0, 1, 2]],
                        "mean": False,
                        "pusher": -1,
                    }
                ],
            },
            "DECLARE: keys: slices is [0, 1, 2], expected 2 values",
        ),
        (Kind.OPTIMIZER, {"spec": "sgd"}, "OPTIMIZER: spec is 'sgd', expected an object"),
        (Kind.PUSH, {}, "frame kind 33 where a control message was expected"),
    ],
)
def test_invalid_values_are_named(kind, content, said):
    with pytest.raises(FrameError, match=re.escape(said)):
        sent(content, kind)


def test_a_message_of_many_small_values_is_refused_before_it_takes_memory():
    payload = b'{"type":"dist_sync","staleness":0,"keys":[' + b"[]," * 2_700_000 + b"[]]}"
    assert len(payload) < MAX_CONTROL
    tracemalloc.start()
    try:
        with pytest.raises(FrameError, match="control frame with more than 786432 commas"):
            decode(Kind.DECLARE, payload)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_the_largest_declaration_of_a_server_is_accepted():
    slices = tuple((index, 1 << 20) for index in range(MAX_SLICES))
    keys = (Key(0, "weight", "float32", True, {"type": "none"}, slices),)
    assert decode(Kind.DECLARE, encode(Declare("dist_sync", 0.0, keys))[HEADER_SIZE:]).keys == keys


def test_an_unexpected_message_is_named():
    assert message.expect(Bye(), Bye) == Bye()
    with pytest.raises(FrameError, match="Bye where Hello was expected"):
        message.expect(Bye(), Hello)


def test_a_whole_number_is_a_number():
    assert sent({"type": "dist_ssp", "staleness": 3, "keys": []}, Kind.DECLARE) == Declare("dist_ssp", 3.0, ())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
NAMES = sorted({each.name for value in EXAMPLES for each in fields(value)} | {"op", "key", "name", "slices"})
OPERATIONS = st.sampled_from(sorted(message.BY_OP)) | JSON


@given(st.sampled_from([*KINDS, 0, 99]), st.binary(max_size=200))
@example(int(Kind.CONTROL), b"[" * 100_000)
@example(int(Kind.CONTROL), b"\xff")
@example(int(Kind.DECLARE), b'{"type": "dist_sync", "staleness": ' + b"9" * 5000 + b', "keys": []}')
def test_random_bytes_are_a_frame_error(kind, payload):
    with contextlib.suppress(FrameError):
        assert isinstance(message.decode(kind, payload), Message)


@given(st.sampled_from(KINDS), st.dictionaries(st.sampled_from(NAMES), JSON, max_size=5), OPERATIONS)
def test_any_object_is_a_message_or_a_frame_error(kind, content, operation):
    with contextlib.suppress(FrameError):
        assert isinstance(sent({**content, "op": operation}, kind), Message)
    with contextlib.suppress(FrameError):
        assert isinstance(sent(content, kind), Message)


@given(st.sampled_from(EXAMPLES), st.data())
def test_a_message_with_any_field_replaced_is_a_message_or_a_frame_error(value, data):
    content = json.loads(message.encode(value)[HEADER_SIZE:])
    if content:
        content[data.draw(st.sampled_from(sorted(content)))] = data.draw(JSON)
    with contextlib.suppress(FrameError):
        assert isinstance(sent(content, value.kind), Message)


def test_operations_keep_their_names():
    """They are the protocol's; see docs/protocol.md."""
    assert {name: each.__name__ for name, each in message.BY_OP.items()} == {
        "register": "Register",
        "heartbeat": "Heartbeat",
        "barrier": "Barrier",
        "release": "Release",
        "bye": "Bye",
        "abort": "Abort",
        "overdue": "Overdue",
        "link lost": "LinkLost",
        "start": "Start",
        "shutdown": "Shutdown",
        "ready": "Ready",
        "flush": "Flush",
        "flushed": "Flushed",
        "enter": "Enter",
        "invite": "Invite",
        "admit": "Admit",
        "leaving": "Leaving",
        "left": "Left",
        "speed": "Speed",
        "has state": "HasState",
        "rejoin": "Rejoin",
        "superseded": "Superseded",
        "failed": "Failed",
        "change": "Change",
        "stops": "Stops",
        "changed": "Changed",
        "took": "Took",
    }
    documented = (Path(__file__).parents[2] / "docs/protocol.md").read_text()
    assert [name for name in message.BY_OP if f"| `{name}`" not in documented and f", `{name}`" not in documented] == []


@pytest.mark.parametrize(
    "value, name",
    [
        (Hello("job", "worker", 0, "server 0", "data", "plain", "00"), "job"),
        (Hello("job", "worker", 0, "server 0", "data", "plain", "00"), "nonce"),
        (Challenge("00", "11"), "nonce"),
        (Challenge("00", "11"), "proof"),
        (Proof("22"), "proof"),
    ],
    ids=str,
)
def test_texts_of_a_handshake_have_a_limit(value, name):
    """Who sends them has not proved yet to belong to the job."""
    content = json.loads(message.encode(value)[HEADER_SIZE:])
    assert getattr(sent({**content, name: "a" * 512}, value.kind), name) == "a" * 512
    with pytest.raises(FrameError, match=f"{name} of 513 characters, expected 512 at most"):
        sent({**content, name: "a" * 513}, value.kind)
