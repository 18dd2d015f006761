"""The messages between launcher and agents: every one survives the way; what is none is a ProtocolError."""

import json
import zlib
from dataclasses import FrozenInstanceError, field, fields
from pathlib import Path
from typing import get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmltrain.base.safe_text import safe_lines
from dmltrain.kvstore.scheduler import agent, reports
from dmltrain.kvstore.transport import message
from dmltrain_launch.agent import commands, events
from dmltrain_launch.agent.channel import Incoming
from dmltrain_launch.agent.commands import COMMANDS, AnnouncedEntry, Beat, Peer, Spawn
from dmltrain_launch.agent.events import EVENTS, StoppedProcess
from dmltrain_launch.agent.protocol import (
    EVENT,
    GREETING,
    HEADER,
    HELLO,
    LIST_BYTES,
    MESSAGE_BYTES,
    OUTPUT,
    SHAPES,
    VERSION,
    ProtocolError,
    batches,
    decode_command,
    decode_event,
    decode_report,
    encode_change,
    encode_command,
    encode_event,
    filler,
)
from dmltrain_launch.agent.reports import ASKED, MADE, REFUSED, REPORT_BYTES, REPORTS, Leaves, Slowest, Told, Viewed
from dmltrain_launch.agent.text import one_line
from dmltrain_launch.agent.value import Value, value
from dmltrain_launch.channels import ChannelError, frames
from tests.tiers import examples

ROOT = Path(__file__).parents[2]
WHOLE, AMOUNT, TEXT = st.integers(0, 65535), st.floats(0, 1e6), st.text()
BIG = st.integers(-(1 << 40), 1 << 60)
LINE = TEXT.map(one_line)
TEXTS, STRINGS = st.lists(TEXT).map(tuple), st.dictionaries(TEXT, TEXT)
PEER = st.builds(Peer, TEXT, TEXT, WHOLE)
SPAWN = st.builds(Spawn, WHOLE, TEXTS, STRINGS, TEXT, TEXT, st.booleans(), WHOLE, st.booleans())
VALUES = {  # of the fields, by their types
    "str": TEXT,
    "Text": LINE,
    "Facts": st.dictionaries(LINE, st.none() | LINE | WHOLE | st.lists(LINE)),
    "bool": st.booleans(),
    "int": st.integers(-(1 << 62), 1 << 62),
    "float": st.floats(-1e6, 1e6),
    "Seconds": AMOUNT | WHOLE,
    "Share": st.floats(0, 1),
    "Amount": AMOUNT | WHOLE,
    "Count": WHOLE,
    "Port": WHOLE,
    "Number": WHOLE,
    "Peer": PEER,
    "tuple[str, ...]": TEXTS,
    "tuple[Text, ...]": st.lists(LINE).map(tuple),
    "tuple[Facts, ...]": st.lists(st.dictionaries(LINE, LINE)).map(tuple),
    "tuple[Count, ...]": st.lists(WHOLE).map(tuple),
    "tuple[Number, ...]": st.lists(WHOLE).map(tuple),
    "tuple[Peer, ...]": st.lists(PEER).map(tuple),
    "tuple[AnnouncedEntry, ...]": st.lists(st.builds(AnnouncedEntry, WHOLE, TEXT, TEXT, WHOLE, BIG, WHOLE, TEXT)).map(
        tuple
    ),
    "tuple[StoppedProcess, ...]": st.lists(st.builds(StoppedProcess, WHOLE, st.none() | WHOLE)).map(tuple),
    "tuple[Spawn, ...]": st.lists(SPAWN).map(tuple),
    "dict[str, str]": STRINGS,
    "dict[str, Port]": st.dictionaries(TEXT, WHOLE),
    "dict[str, Any]": st.dictionaries(TEXT, st.none() | TEXT | WHOLE),
    "dict[str, dict[str, Any]]": st.dictionaries(TEXT, st.builds(dict, ms=AMOUNT) | st.builds(dict, error=LINE)),
}
VALUES["Outcome"] = st.sampled_from([ASKED, REFUSED, MADE])
VALUES |= {f"{each} | None": st.none() | VALUES[each] for each in ("str", "Share", "Amount", "Port")}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def messages(table: dict[str, type]) -> st.SearchStrategy:
    return st.sampled_from(sorted(table)).flatmap(
        lambda name: st.builds(table[name], *(VALUES[field.type] for field in fields(table[name])))
    )


VALUES["Report"] = messages(REPORTS)


def garbled(tag: str, table: dict[str, type]) -> st.SearchStrategy:
    """JSON of any shape, often with a name and fields of the protocol and anything as their values."""
    names = sorted({field.name for kind in table.values() for field in fields(kind)})
    named = st.fixed_dictionaries(
        {tag: st.sampled_from(sorted(table))}, optional=dict.fromkeys(names, JSON) | {"padding": JSON}
    )
    return JSON | named


@given(messages(COMMANDS))
def test_a_command_comes_as_it_was_sent(command):
    line = encode_command(command)
    assert line.endswith(b"\n") and line.count(b"\n") == 1
    assert decode_command(line) == command


@given(messages(EVENTS))
def test_an_event_comes_as_it_was_sent_and_its_host_is_the_connections(event):
    found = decode_event(encode_event(event), "h7")
    assert (type(found), found.host) == (type(event), "h7")
    assert {**vars(found), "host": event.host} == vars(event)


@pytest.mark.parametrize(
    "report",
    [
        Viewed(3, (0, 1, 7)),
        Viewed(1, tuple(range(10_000))),
        Leaves(4, "SIGTERM"),
        Told(1, ASKED),
        Told(2, REFUSED, "the job is ending"),
        Told(3, MADE, "kv_store=dist_ssp staleness=4", "after step 147"),
        Slowest(3, 55.0),
    ],
)
def test_both_packages_mean_the_same_by_what_a_scheduler_reports(report):
    theirs = getattr(reports, type(report).__name__)(**vars(report))
    assert decode_report(reports.encode(theirs)) == report
    assert REPORT_BYTES == reports.MESSAGE_BYTES


def test_a_long_text_of_a_report_is_cut_and_a_view_that_is_too_large_is_refused():
    said = reports.encode(reports.Leaves(4, "\U0001f600" * 10_000))
    assert decode_report(said) == Leaves(4, "\U0001f600" * (1 << 12))
    with pytest.raises(ValueError, match="expected at most 65536"):
        reports.encode(reports.Viewed(1, tuple(range(20_000))))


def test_a_scheduler_is_asked_for_the_change_that_the_user_wants():
    wanted = commands.Change(3, 2, "dist_ssp", 4.0, "me")
    assert agent.decode(encode_change(wanted)) == message.Change(2, "dist_ssp", 4.0, "me")


UNSAFE = ("\n", "\r", "\x1b[2J", "\x07", "\x9b2J", "\u2028", "\u202e", "\x7f", "\0")


@pytest.mark.parametrize("unsafe", UNSAFE)
@pytest.mark.parametrize(
    ("event", "field"),
    [
        ({"event": "refused", "code": 2}, "message"),
        ({"event": "measured", "peer": "h"}, "error"),
        ({"event": "synced", "files": 1, "bytes": 1, "changed": []}, "notes"),
        ({"event": "probed"}, "facts"),
        ({"event": "listing"}, "rows"),
        ({"event": "reached"}, "peers"),
        ({"event": "reported", "task": 1}, "report"),
    ],
)
def test_a_text_of_an_agent_is_one_printable_line(event, field, unsafe):
    text = f"a{unsafe}dmltrain-file job.json e30="
    sent = {"notes": [text], "facts": {text: [text]}, "rows": [{"a": {"b": text}}], "peers": {"h": {"error": text}}}
    sent["report"] = {"op": "leaves", "rank": 1, "reason": text}
    found = decode_event(json.dumps({**event, field: sent.get(field, text)}).encode(), "h")
    assert one_line(text).isprintable() and one_line(text) != text
    assert json.dumps(vars(found)[field], default=lambda report: {"op": "leaves", **vars(report)}) == json.dumps(
        sent.get(field, text)
    ).replace(json.dumps(text)[1:-1], json.dumps(one_line(text))[1:-1])


def test_an_event_nested_too_deeply_is_a_protocol_error():
    for levels in (100, 900, 5000, 50_000):
        text = b'{"event": "probed", "facts": {"a": %s%s}}' % (b"[" * levels, b"]" * levels)
        try:
            decode_event(text, "h")
        except ProtocolError as error:
            assert "expected" in str(error)


def test_lines_of_the_launchers_own_stay():
    assert safe_lines("one\n\ttwo\x1b[2J\r") == "one\n\ttwo\\x1b[2J\\r"


@settings(max_examples=examples(30))  # they take long to make
@given(garbled("do", COMMANDS) | garbled("event", EVENTS) | garbled("op", REPORTS))
def test_json_of_any_shape_is_a_message_or_a_protocol_error(found):
    for decode in (decode_command, lambda text: decode_event(text, "h"), decode_report):
        try:
            decode(json.dumps(found).encode())
        except ProtocolError as error:
            assert "expected" in str(error) or "its fields are" in str(error)


@given(st.binary())
def test_bytes_of_any_kind_are_a_protocol_error(found):
    with pytest.raises(ProtocolError, match="expected"):
        decode_command(b"{" + found)


def test_json_without_end_is_a_protocol_error():
    with pytest.raises(ProtocolError, match="is not JSON"):
        decode_command(b"[" * 200_000)


START = b'{"do": "start", "unset": [], "tasks": [{"task": %s, "argv": [], "environment": %s, "workdir": ""}]}'
TASK = "a process to start is"
PATH = 'expected an object of {"ms": number} or {"error": text}'


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"[]", "'[]' is not a message; expected 'do' to be one of job, attach, kept, sync, "),
        (b'{"do": "leave"}', "is not a message; expected 'do' to be one of "),
        (b'{"do": ["job"]}', "is not a message; expected 'do' to be one of "),
        (b'{"do": "stop"}', "message 'stop' lacks the field 'grace': expected a number of seconds, 0 or more"),
        (b'{"do": "stop", "grace": true}', "'grace' of message 'stop' is 'true'; expected a number of seconds"),
        (b'{"do": "stop", "grace": -1}', "'grace' of message 'stop' is '-1'; expected a number of seconds"),
        (b'{"do": "stop", "grace": NaN}', "'grace' of message 'stop' is 'NaN'; expected a number of seconds"),
        (b'{"do": "stop", "grace": 1, "dumps": true}', "unknown field 'dumps'; its fields are: grace, dump"),
        (b'{"do": "same", "x": 1}', "message 'same' has the unknown field 'x'; its fields are: none"),
        (b'{"do": "beat", "x": 1}', "message 'beat' has the unknown field 'x'; its fields are: filler"),
        (b'{"do": "reach", "peers": [["a", "b"]]}', "expected a list of [name, address, port]"),
        (b'{"do": "bind", "address": "a", "master": 65536}', "expected a port, 0 to 65535, or null"),
        (b'{"do": "start", "unset": [], "tasks": [{"task": 1}]}', "a process to start lacks the field 'argv'"),
        (b'{"do": "file", "entry": 0, "bytes": -5}', "expected a whole number, 0 or more"),
        (b'{"do": "stop", "grace": "1"}', "field 'grace' of message 'stop' is '\"1\"'; expected a number of seconds"),
        (b'{"do": "stop", "grace": 1, "dump": 1}', "field 'dump' of message 'stop' is '1'; expected true or false"),
        (b'{"do": "list", "mark": 7}', "field 'mark' of message 'list' is '7'; expected text"),
        (b'{"do": "probe", "request": []}', "field 'request' of message 'probe' is '[]'; expected an object"),
        (b'{"do": "bind", "address": "a", "scheduler": null, "reach": null}', "is 'null'; expected true or false"),
        (b'{"do": "start", "unset": 3, "tasks": []}', "'unset' of message 'start' is '3'; expected a list of text"),
        (b'{"do": "start", "unset": [3], "tasks": []}', "'unset' of message 'start' is '[3]'; expected a list of text"),
        (START % (b"1", b'{"A": 1}'), f"'environment' of {TASK} '{{\"A\": 1}}'; expected an object of text"),
        (START % (b"65536", b"{}"), f"field 'task' of {TASK} '65536'; expected the number of a task"),
        (b'{"do": "start", "unset": [], "tasks": [1]}', "'tasks' of message 'start' is '[1]'; expected a list of a"),
        (b'{"do": "entries", "entries": [[0, "f", "a", 0, 0.5, 0, ""]], "last": true}', "expected a list of [number, "),
        (b'{"do": "stop", "host": "h", "grace": 1}', "unknown field 'host'; its fields are: grace, dump"),
        (b'{"event": "ready", "pid": 0.5, "cores": 1}', "'pid' of message 'ready' is '0.5'; expected a whole number"),
        (b'{"event": "bound", "ports": {"reach": 70000}}', "'{\"reach\": 70000}'; expected an object of a port, 0 to"),
        (b'{"event": "reached", "peers": {"a": {"ms": "1"}}}', 'reached\' is \'{"a": {"ms": "1"}}\'; ' + PATH),
        (b'{"event": "reached", "peers": {"a": {"error": 1}}}', "expected an object of"),
        (b'{"event": "reached", "peers": {"a": {"ms": 1, "error": ""}}}', "expected an object of"),
        (b'{"event": "reached", "peers": {"a": {"ns": 1}}}', "expected an object of"),
        (b'{"event": "stopped", "processes": [[1, 2, 3]]}', "expected a list of [pid, task]"),
        (b'{"event": "stopped", "processes": [[1, -1]]}', "expected a list of [pid, task]"),
        (b'{"event": "beat", "host": "x"}', "message 'beat' has the unknown field 'host'; its fields are: filler"),
        (b'{"event": "ready", "host": "other", "pid": 1, "cores": 1}', "unknown field 'host'"),
        (b'{"event": "ready", "pid": 1}', "message 'ready' lacks the field 'cores': expected a whole number"),
        (
            b'{"event": "reported", "task": 1, "report": {"op": "stop"}}',
            "with 'op', one of view, leaves, change, slowest",
        ),
        (b'{"event": "reported", "task": 1, "report": {"op": "leaves", "rank": 1}}', "report 'leaves' lacks the field"),
        (b'{"op": "change", "number": 1, "outcome": "lost"}', "is '\"lost\"'; expected asked, refused or made"),
        (b'{"op": "slowest", "rank": 1, "percent": Infinity}', "expected a number, 0 or more"),
        (b'{"sent": "beat"}', "is not a message; expected 'do' to be one of "),
        (b'{"event": "leave"}', "is not a message; expected 'event' to be one of "),
    ],
)
def test_an_error_names_what_was_expected(line, said):
    with pytest.raises(ProtocolError) as error:
        decode = decode_report if line.startswith(b'{"op"') else decode_command
        decode_event(line, "h") if b'"event"' in line else decode(line)
    assert said in str(error.value)


def test_a_long_message_is_shown_in_part():
    for text, shown in ((b"x" * 100, "x" * 100 + "' is not JSON"), (b"x" * 101, "x" * 100 + "'... is not JSON")):
        with pytest.raises(ProtocolError, match=f"^'{shown}; expected an object with 'do'$"):
            decode_command(text)
    with pytest.raises(ProtocolError, match=r"^'\\xe9\\ufffd' is not JSON"):
        decode_command("é".encode() + b"\xff")


@pytest.mark.parametrize(
    ("line", "least", "most"),
    [
        (b'{"do": "bind", "address": "a", "master": %d}', 0, 65535),
        (START % (b"%d", b"{}"), 0, 65535),
        (b'{"do": "stop", "grace": %d}', 0, 10**9),
        (b'{"do": "file", "entry": %d, "bytes": 0}', 0, 1 << 63),
        (b'{"do": "entries", "entries": [[0, "file", "a", 0, %d, 0, ""]], "last": true}', -(1 << 63), 1 << 63),
    ],
)
def test_numbers_have_limits(line, least, most):
    for number in (least, most):
        assert isinstance(decode_command(line % number), commands.Command)
    for number in (least - 1, most + 1):
        with pytest.raises(ProtocolError):
            decode_command(line % number)


def test_every_message_is_in_a_table():
    """And each field has a check."""
    for module, base, table in ((commands, commands.Command, COMMANDS), (events, events.Event, EVENTS)):
        kinds = {var for var in vars(module).values() if isinstance(var, type) and issubclass(var, base)}
        assert set(table.values()) == kinds - {base}
    assert all(set(get_type_hints(kind)) == set(shape) for kind, shape in SHAPES.items())


class Script:
    """A channel that says what it is told to, piece by piece."""

    def __init__(self, *pieces: bytes):
        self.pieces = list(pieces)

    def read(self, timeout: float) -> bytes:
        return self.pieces.pop(0) if self.pieces else b""


def test_another_version_is_refused_before_the_first_message():
    with pytest.raises(ChannelError, match=f"has version 1 of the protocol, expected {VERSION}"):
        list(frames(Script(b"Welcome\n", GREETING[:3], GREETING[3:] + b"1", b"\n"), 1))


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_frames_arrive_whole_however_they_are_cut(size):
    expected = [(1, 0, b"a" * 20), (2, 65535, b""), (1, 3, b"\0\n")]
    sent = [HEADER.pack(kind, task, len(payload)) + payload for kind, task, payload in expected]
    said = b"".join((b"Welcome to host!\n", HELLO, *sent))
    pieces = [said[start : start + size] for start in range(0, len(said), size)]
    assert list(frames(Script(*pieces), 1)) == expected


def test_a_host_that_sends_other_data():
    with pytest.raises(ChannelError, match="python3: command not found"):
        list(frames(Script(b"python3: command not found\n"), 1))
    with pytest.raises(ChannelError, match="did not start"):
        list(frames(Script(*[b"noise" * 1000] * 100), 1))


def test_a_heartbeat_does_not_fit_into_a_packet_even_where_ssh_compresses_all():
    stream = zlib.compressobj()
    for beat in (Beat(filler()), Beat(filler())):
        assert len(stream.compress(encode_command(beat)) + stream.flush(zlib.Z_SYNC_FLUSH)) > 1500


class Endless:
    """A channel that never ends: a greeting, then `first`, then zeros; `went` counts its bytes."""

    def __init__(self, first: bytes):
        self.first, self.went = HELLO + first, 0

    def read(self, timeout: float) -> bytes:
        data, self.first = self.first or bytes(1 << 16), b""
        self.went += len(data)
        return data


@pytest.mark.parametrize("kind, most", [(OUTPUT, 1 << 16), (EVENT, 4 << 20), (3, -1)])
def test_a_frame_that_is_too_long_or_of_an_unknown_kind_is_refused_before_it_is_read(kind, most):
    for length in (most + 1, (1 << 32) - 1):
        agent = Endless(HEADER.pack(kind, 0, length))
        with pytest.raises(ProtocolError, match=f"kind {kind} with {length} bytes; expected kind 1 with at"):
            next(frames(agent, 1.0))
        assert agent.went == len(HELLO) + HEADER.size
    if most > 0:
        agent = Endless(HEADER.pack(kind, 0, most))
        assert next(frames(agent, 1.0)) == (kind, 0, bytes(most))


def test_a_line_that_never_ends_takes_little_memory_and_the_next_is_read():
    incoming, errors = Incoming(), 0
    beat = encode_command(commands.Beat())
    for _ in range(3):
        for _ in range((12 << 20) >> 16):
            incoming.feed(b"x" * (1 << 16))
            try:
                assert list(incoming) == []
            except ProtocolError as error:
                errors += 1
                assert str(error).endswith(" bytes; expected at most 4194304")
            assert len(incoming.data) <= MESSAGE_BYTES + (1 << 16)
        incoming.feed(b"end of it\n" + beat)
        assert list(incoming) == [commands.Beat()]
    assert errors == 3, "once for each line"


HEAVY = {
    "lists": lambda: b"[%s]" % b",".join([b"[]"] * 400_000),
    "objects": lambda: b"[%s]" % b",".join([b'{"a":1}'] * 200_000),
    "numbers": lambda: b"[%s]" % b",".join([b"1000"] * 600_000),
    "names": lambda: b"{%s}" % b",".join(b'"%d":1' % number for number in range(300_000)),
}


@pytest.mark.parametrize("what", HEAVY)
def test_a_message_that_would_take_much_memory_is_refused_before_it_is_read(what):
    text = b'{"event": "probed", "facts": %s}' % HEAVY[what]()
    assert len(text) < MESSAGE_BYTES
    with pytest.raises(ProtocolError, match=r"the message takes about \d+ MiB; expected at most 24"):
        decode_event(text, "h1")


def test_a_number_of_many_digits_is_refused_at_once():
    """Python before 3.11 reads it in a time that is quadratic in its length: minutes for a million digits."""
    for digits, fits in ((40, True), (41, False), (3_000_000, False)):
        text = b'{"event": "probed", "facts": {"a": %s}}' % (b"9" * digits)
        if fits:
            assert decode_event(text, "h1").facts == {"a": int("9" * digits)}
        else:
            with pytest.raises(ProtocolError, match="is not JSON"):
                decode_event(text, "h1")


def test_a_message_that_is_too_long_is_not_sent_either():
    with pytest.raises(ProtocolError, match=r"message 'sync' has \d+ bytes; expected at most 4194304"):
        encode_command(commands.Sync("x" * (4 << 20)))
    with pytest.raises(ProtocolError, match="message 'refused' has .* bytes; expected at most 4194304"):
        encode_event(events.Refused("", "x" * (4 << 20), 2))


def test_a_list_travels_in_parts_none_of_which_is_long():
    for items in ([], [5], ["x" * 70_000], [1, "y" * 70_000, 2], list(range(30_000)), ["\udcff" * 100] * 999):
        found = list(batches(items))
        assert [each for part, _ in found for each in part] == items
        assert [last for _, last in found] == [False] * (len(found) - 1) + [True]
        assert all(len(part) == 1 or len(json.dumps(part)) <= LIST_BYTES + 2 for part, _ in found)


# -- their base, a frozen dataclass ------------------------------------------------------------------------------------


@value(frozen=True)
class Pair(Value):
    first: int
    second: str = "two"
    rest: list[int] = field(default_factory=list)


@value(frozen=True)
class Other(Pair): ...


def test_fields_are_given_by_place_by_name_or_by_their_defaults():
    assert vars(Pair(1)) == {"first": 1, "second": "two", "rest": []}
    assert vars(Pair(1, "b", [3])) == vars(Pair(rest=[3], second="b", first=1)) == vars(Pair(1, rest=[3], second="b"))
    assert Pair(1).rest is not Pair(1).rest, "each has a list of its own"
    assert [field.name for field in fields(Pair)] == ["first", "second", "rest"]


TWICE = r"^Pair takes each of \(first, second, rest\) once: \(1,.*\), \{.*\}$"


@pytest.mark.parametrize(
    ("args", "named", "said"),
    [
        *(((1, "b", [], 4), {}, TWICE), ((1,), {"third": 3}, TWICE), ((1,), {"first": 1}, TWICE)),
        *(((), {}, "^field 'first' is missing$"), ((), {"second": "b"}, "^field 'first' is missing$")),
    ],
)
def test_what_are_no_fields_is_refused(args, named, said):
    with pytest.raises(TypeError, match=said):
        Pair(*args, **named)


def test_values_of_one_class_are_equal_by_their_fields_and_shown_with_them_and_do_not_change():
    made = Pair(1)
    assert made == Pair(1, "two") and repr(Pair(1, "b")) == "Pair(first=1, second='b', rest=[])"
    assert all(made != other for other in (Pair(2), Pair(1, "b"), Other(1), 1))
    assert len({Pair(number % 2, rest=()) for number in range(4)}) == 2
    with pytest.raises(FrozenInstanceError, match="assign to field 'first'"):
        made.first = 2
    with pytest.raises(FrozenInstanceError, match="delete field 'first'"):
        del made.first
    with pytest.raises(TypeError, match="always frozen"):
        value(frozen=False)
