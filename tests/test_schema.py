"""The codec of all messages and of our own files: what annotations ask for, what errors say, and one table of all
messages, whose mutations are read or refused in limited memory and time (tests/fuzzing.py)."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmltrain.audit import draws, lines, views_file
from dmltrain.base import json_text, schema
from dmltrain.base.errors import UserError
from dmltrain.base.schema import Invalid
from dmltrain.kvstore.scheduler import agent
from dmltrain.kvstore.transport import message, wire
from dmltrain.kvstore.transport.message.base import Message
from dmltrain.report.runs import job_record
from dmltrain_launch.agent import commands, events, protocol
from dmltrain_launch.agent.protocol import ProtocolError
from dmltrain_launch.agent.reports import MADE, REPORTS, Leaves, Slowest, Told, Viewed
from dmltrain_launch.control import message as control
from dmltrain_launch.control.message import ControlError
from dmltrain_launch.job.settings import Settings
from dmltrain_launch.run.planned.settings import request
from tests.audit.test_count import RECORDED, SAMPLES
from tests.fuzzing import Fuzzed, parts, survive
from tests.kvstore.test_message import EXAMPLES
from tests.launch.test_fuzz import COMMANDS, EVENTS

# -- annotations -------------------------------------------------------------------------------------------------------

Port = schema.whole(0, 65535)
Name = schema.text(5)
Share = schema.number(0, 1, "a share")
Colour = schema.choice("red", "blue")
Cut = schema.text().then(lambda text: text[:3]).only(bool, "a text that is not empty")
Found = schema.either({"ms": schema.number(), "error": Name})


class Peer(NamedTuple):
    name: Name
    port: Port | None


@dataclass(frozen=True)
class Inner:
    port: Port
    loud: bool = False

    def __post_init__(self) -> None:
        if self.loud and not self.port:
            raise ValueError("a loud port 0, expected another")


@dataclass(frozen=True)
class Outer:
    whole: int = 0
    real: float = 0.0
    words: tuple[Name, ...] = ()
    ports: tuple[Port, ...] = ()
    pairs: tuple[tuple[int, Share], ...] = ()
    inner: Inner | None = None
    inners: tuple[Inner, ...] = ()
    peers: tuple[Peer, ...] = ()
    named: Mapping[str, Port] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    colour: Colour = "red"
    found: Found = field(default_factory=lambda: {"ms": 0})


@dataclass(frozen=True)
class Loose(Outer):
    MAY_OMIT = True


@dataclass(frozen=True)
class Later:
    MAY_OMIT = MAY_HAVE_MORE = True

    port: Port
    words: tuple[Name, ...] = ()


FULL = Outer(
    *(-5, 0.5, ("a", "äöüßé"), (0, 65535), ((1, 1.0),), Inner(7, True), (Inner(0), Inner(1)), (Peer("a", None),)),
    *({"x": 3}, {"any": [None, {"a": 1e300}]}, "blue", {"error": "no"}),
)
CONTENT = json.loads(json_text.encode(FULL))
WHOLE = "a whole number from 0 to 65535"


def test_what_was_written_is_read():
    assert schema.read(Outer, CONTENT) == FULL
    assert schema.read(Outer, {**CONTENT, "real": 3}).real == 3.0
    assert schema.read(Outer, {**CONTENT, "inner": None}).inner is None


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        *(({"whole": value}, f"whole is {value}, expected a whole number") for value in (True, 1.0, 2**63 + 1)),
        *(({"real": value}, f"real is {value}, expected a number") for value in (False, math.nan, math.inf, -2e15)),
        ({"words": "a"}, "words is 'a', expected a list of a text of at most 5 characters"),
        *(({"words": ["", v]}, f"words[1] is {v!r}, expected a text of at most 5 char") for v in (7, "abcdef")),
        *(({"ports": [0, 1, value]}, f"ports[2] is {value}, expected {WHOLE}") for value in (-1, 65536, True, 0.5, {})),
        ({"pairs": [[1]]}, "pairs[0] is [1], expected a list of 2 values"),
        ({"pairs": [[1, 1], [1, 1.5]]}, "pairs[1][1] is 1.5, expected a share"),
        ({"inner": {"port": 7}}, "inner lacks the field 'loud', expected port, loud"),
        ({"inner": {"port": 7, "loud": 1}}, "inner.loud is 1, expected true or false"),
        ({"inner": {"port": 0, "loud": True}}, "inner is wrong: a loud port 0, expected another"),
        ({"inners": [{"port": 1, "loud": False, "x\n": 1}]}, "inners[0] has the unknown field 'x\\n', expected port, "),
        ({"peers": [["a", 1, 2]]}, "peers[0] is ['a', 1, 2], expected [name, port]"),
        ({"peers": [["a", 1], ["b", -1]]}, f"peers[1][1] is -1, expected {WHOLE}"),
        ({"named": {"a": 1, "b\n": "2"}}, f"named['b\\n'] is '2', expected {WHOLE}"),
        *(({name: []}, f"{name} is [], expected an object") for name in ("named", "facts", "inner")),
        *(({"colour": value}, f"colour is {value!r}, expected one of red, blue") for value in ("", [], "green")),
        ({"found": {"ms": "1"}}, "found.ms is '1', expected a number"),
        *(({"found": v}, f"found is {v}, expected an object with 'ms': a number or") for v in ({}, 1, {"s": 1})),
        ({"more": 1}, "it has the unknown field 'more', expected whole, real, words, "),
        ({"facts": "x" * 99}, f"facts is '{'x' * 99}..., expected an object"),
    ],
)
def test_an_error_names_the_field_what_came_and_what_was_expected(changed, said):
    for kind in (Outer, Loose):
        with pytest.raises(Invalid) as error:
            schema.read(kind, {**CONTENT, **changed})
        assert str(error.value).startswith(said)


def test_a_type_of_some_values_has_what_the_type_made_of_them():
    assert Cut.read("abcdef") == Cut.salvage("abcdef") == "abc"
    for value in ("", 7):
        with pytest.raises(Invalid, match="expected a text"):
            Cut.read(value)


def test_a_byte_order_mark_is_no_part_of_the_text():
    assert json_text.parse(b"\xef\xbb\xbf[1]") == [1]


def test_a_field_may_be_missing_only_where_the_class_says_so():
    content = dict(CONTENT)
    del content["ports"]
    assert schema.read(Loose, content).ports == () and schema.read(Loose, {}) == Loose()
    with pytest.raises(Invalid, match="^it lacks the field 'ports', expected whole, real, words, ports, "):
        schema.read(Outer, content)
    with pytest.raises(Invalid, match="^it is 7, expected an object$"):
        schema.read(Loose, 7)
    assert schema.read(Later, {"port": 3, "more": 1}) == Later(3)
    with pytest.raises(Invalid, match="^it lacks the field 'port', expected port, words$"):
        schema.read(Later, {"more": 1})


def test_of_a_file_that_others_may_have_written_what_is_right_is_used():
    wrong = {"whole": "x", "ports": [1, -1, 2], "inners": [7, {"port": 3}, {"loud": True, "port": -1}], "inner": "x"}
    damaged = {**CONTENT, **wrong, "named": {"a": 1, "b": -1}, "words": 7, "colour": "green", "more": 1}
    found = schema.salvaged(Salvaged, damaged)
    assert found == Salvaged(0, (1, 2), (Loosest(3), Loosest()), None, {"a": 1})
    with pytest.raises(Invalid, match=r"^it is \[\], expected an object"):
        schema.salvaged(Salvaged, [])


@dataclass(frozen=True)
class Loosest:
    port: Port = 0


@dataclass(frozen=True)
class Salvaged:
    whole: int = 0
    ports: tuple[Port, ...] = ()
    inners: tuple[Loosest, ...] = ()
    inner: Loosest | None = None
    named: dict[str, Port] = field(default_factory=dict)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "it is not JSON (Expecting value: line 1 column 1 (char 0)): ''"),
        (b"x\x1b[2J", "it is not JSON (Expecting value: line 1 column 1 (char 0)): 'x\\x1b[2J'"),
        (b"\xff", "it is not JSON ('utf-8' codec can't decode byte 0xff"),
        (b"[" * 5000, "it is not JSON ("),
        (b"[%s]" % (b"9" * 41), "it is not JSON (a number of 41 digits, expected at most 40): '[999"),
        (b"9" * 3_000_000, "it has 3000000 bytes, expected at most 2000000"),
        (b"[%s]" % b",".join([b"[]"] * 400_000), "it takes about 61 MiB, expected at most 16"),
        (b"{%s}" % b",".join(b'"%d":1' % number for number in range(150_000)), "it takes about 18 MiB, expected at"),
    ],
)
def test_what_is_no_json_or_too_large_is_refused(content, said):
    with pytest.raises(Invalid) as error:
        json_text.parse(content, most=2_000_000, memory=16 << 20)
    assert str(error.value).startswith(said)


# -- all messages ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Protocol:
    """`write` gives what `read` reads; None: there is no way back. `classes`: of its messages."""

    examples: Sequence[Any]
    write: Callable[[Any], bytes] | None
    read: Callable[[bytes], Any]
    error: type[Exception]
    classes: Sequence[type] = ()

    def check(self, content: bytes) -> None:
        """What was read from any bytes is written and read as the same."""
        found = self.read(content)
        if self.write:
            assert self.read(self.write(found)) == found

    @property
    def golden(self) -> list[bytes]:
        return [self.write(example) if self.write else example for example in self.examples]


def framed(value: Message) -> bytes:
    return bytes([value.kind]) + message.encode(value)[wire.HEADER_SIZE :]


RECORDS = [path.read_bytes() for path in sorted(Path("logs/reference").glob("*/job.json"))]
PROTOCOLS = {
    "SCHEDULER": Protocol(
        EXAMPLES,
        framed,
        lambda data: message.decode(data[0] if data else 0, data[1:]),
        wire.FrameError,
        (*message.BY_OP.values(), *message.BY_KIND.values()),
    ),
    "COMMANDS": Protocol(
        COMMANDS, protocol.encode_command, protocol.decode_command, ProtocolError, list(commands.COMMANDS.values())
    ),
    "EVENTS": Protocol(
        EVENTS,
        protocol.encode_event,
        lambda data: protocol.decode_event(data, ""),
        ProtocolError,
        list(events.EVENTS.values()),
    ),
    "REPORTS": Protocol(
        [
            Viewed(3, (0, 1, 7)),
            Leaves(4, "SIGTERM"),
            Told(3, MADE, "kv_store=dist_ssp", "after step 147"),
            Slowest(3, 55),
        ],
        json_text.encode,
        protocol.decode_report,
        ProtocolError,
        list(REPORTS.values()),
    ),
    "CHANGES": Protocol([request(2, Settings("dist_ssp", 4.0), "me").encode()], None, agent.decode, wire.FrameError),
    "REQUESTS": Protocol(
        [control.Request("add", "h6,h7:2"), control.Request("attach", "ä")],
        control.encode_request,
        control.decode_request,
        ControlError,
    ),
    "ANSWERS": Protocol(
        [control.Answer(0, ()), control.Answer(255, ("worker 3 has joined", "\n\x1b"))],
        lambda answer: json_text.encode({"version": 1, "dmltrain": "0.5", **vars(answer)}),
        control.decode_answer,
        ControlError,
    ),
    "DRAWS": Protocol(
        [draws.Facts(1, 42, 2, True), draws.Facts(1, 9, 1, False, ((2, 4), (1, 0)))],
        json_text.encode,
        draws.parse,
        ValueError,
    ),
    "VIEWS": Protocol([RECORDED], views_file.encode, views_file.parse, ValueError),
    "SAMPLES": Protocol([json_text.encode(SAMPLES)], None, lambda data: lines.parse_samples(data, 8), ValueError),
    "COMMITS": Protocol(
        [lines.Committed(1, 1, (0,), 1, 1, (1, 2, 3))], json_text.encode, lines.parse_commits, ValueError
    ),
    "JOB": Protocol(RECORDS, None, lambda data: job_record.parse("job.json", data), UserError),
}
WORDS = (b"null", b"[]", b"{}", b"[[", b"[" * 20000, b"true", b"1e999", b"NaN", b"-1", b"\\ud800", b"9" * 50)
globals().update(
    {name: Fuzzed(each.check, lambda each=each: each.golden, (each.error,), WORDS) for name, each in PROTOCOLS.items()}
)


@pytest.mark.parametrize("part", parts())
@pytest.mark.parametrize("name", PROTOCOLS)
def test_every_mutation_is_read_and_written_again_or_refused(name: str, part: int) -> None:
    survive(f"tests.test_schema:{name}", part)


@pytest.mark.parametrize("name", PROTOCOLS)
def test_every_class_of_messages_has_an_example_that_survives_the_way(name):
    each = PROTOCOLS[name]
    assert {type(example) for example in each.examples} >= set(each.classes)
    for example, content in zip(each.examples, each.golden, strict=True):
        assert not each.write or each.read(content) == example


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
ALL = [(name, place) for name, each in PROTOCOLS.items() for place in range(len(each.examples))]


@given(st.sampled_from(ALL), st.data())
def test_a_message_with_any_field_replaced_is_read_or_refused_with_what_was_expected(which, data):
    each = PROTOCOLS[which[0]]
    golden = each.golden[which[1]]
    start = golden.index(b"{")
    content = json.loads(golden[start:])
    content[data.draw(st.sampled_from([*content, "more"]))] = data.draw(JSON)
    try:
        each.check(golden[:start] + json.dumps(content).encode())
    except each.error as error:
        assert "expected" in str(error) or "reads formats 0 and 1" in str(error) or which[0] in ("VIEWS", "ANSWERS")
