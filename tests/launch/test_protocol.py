"""The messages between launcher and agents: every one survives the way; what is none is a ProtocolError."""

import json
import zlib
from dataclasses import FrozenInstanceError, field, fields
from pathlib import Path

import pytest

from dmltrain.kvstore.scheduler import agent, reports
from dmltrain.kvstore.transport.message.changes import Change
from dmltrain_launch.agent import commands, events
from dmltrain_launch.agent.commands import COMMANDS, Beat
from dmltrain_launch.agent.events import EVENTS
from dmltrain_launch.agent.incoming import Incoming
from dmltrain_launch.agent.protocol import (
    EVENT,
    GREETING,
    HEADER,
    HELLO,
    LIST_BYTES,
    MESSAGE_BYTES,
    OUTPUT,
    VERSION,
    ProtocolError,
    batches,
    decode_command,
    decode_event,
    decode_report,
    encode_command,
    encode_event,
    filler,
)
from dmltrain_launch.agent.reports import ASKED, MADE, REFUSED, REPORT_BYTES, Leaves, Slowest, Told, Viewed
from dmltrain_launch.agent.text import one_line
from dmltrain_launch.agent.value import Value, value
from dmltrain_launch.channels import ChannelError, frames
from dmltrain_launch.job.settings import Settings
from dmltrain_launch.run.planned.settings import request

ROOT = Path(__file__).parents[2]


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
    wanted = request(2, Settings("dist_ssp", 4.0), "me")
    assert agent.decode(wanted.encode()) == Change(2, "dist_ssp", 4.0, "me")


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


def test_the_host_of_an_event_is_the_connections():
    assert decode_event(encode_event(events.Started("h1", 3, 4711)), "h7") == events.Started("h7", 3, 4711)
    with pytest.raises(ProtocolError, match="^beat: it has the unknown field 'host'"):
        decode_event(b'{"event": "beat", "host": "x"}', "h7")


START = b'{"do": "start", "unset": [], "tasks": [{"task": %s, "argv": [], "environment": %s, "workdir": ""}]}'


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"Last login", "it is not JSON (Expecting value: line 1 column 1 (char 0)): 'Last login'"),
        (b'{"do": ["job"]}', "do is ['job'], expected one of job, attach, kept, sync, "),
        (b'{"event": "leave"}', "event is 'leave', expected one of ready, "),
        (b'{"do": "stop"}', "stop: it lacks the field 'grace', expected grace, dump"),
        (b'{"do": "stop", "grace": NaN}', "stop: grace is nan, expected a number of seconds, 0 or more"),
        (b'{"do": "same", "x": 1}', "same: it has the unknown field 'x', expected no field"),
        (b'{"do": "reach", "peers": [["a", "b"]]}', "reach: peers[0] is ['a', 'b'], expected [name, address, port]"),
        (b'{"do": "start", "unset": [], "tasks": [{"task": 1}]}', "start: tasks[0] lacks the field 'argv'"),
        (START % (b"1", b'{"A": 1}'), "start: tasks[0].environment.A is 1, expected a text"),
        (b'{"event": "reached", "peers": {"a": {"ns": 1}}}', "reached: peers.a is {'ns': 1}, expected an object with"),
        (b'{"event": "stopped", "processes": [[1, -1]]}', "stopped: processes[0][1] is -1, expected a whole number"),
        (
            b'{"event": "reported", "task": 1, "report": {"op": "stop"}}',
            "reported: report is {'op': 'stop'}, expected an object with 'op', one of view, leaves, change, slowest",
        ),
        (
            b'{"event": "reported", "task": 1, "report": {"op": "leaves", "rank": 1}}',
            "reported: report lacks the field 'reason'",
        ),
        (b'{"op": "change", "number": 1, "outcome": "lost"}', "change: outcome is 'lost', expected one of asked, "),
        (b'{"op": "slowest", "rank": 1, "percent": Infinity}', "slowest: percent is inf, expected a number, 0 or more"),
    ],
)
def test_an_error_names_what_was_expected(line, said):
    with pytest.raises(ProtocolError) as error:
        decode = decode_report if line.startswith(b'{"op"') else decode_command
        decode_event(line, "h") if b'"event"' in line else decode(line)
    assert str(error.value).startswith(said)


def test_numbers_have_limits():
    for port in (-1, 65536):
        with pytest.raises(ProtocolError, match=f"bind: master is {port}, expected a whole number from 0 to 65535"):
            decode_command(b'{"do": "bind", "address": "a", "master": %d}' % port)
        with pytest.raises(ProtocolError, match=rf"start: tasks\[0\].task is {port}"):
            decode_command(START % (b"%d" % port, b"{}"))


def test_every_message_is_in_a_table():
    for module, base, table in ((commands, commands.Command, COMMANDS), (events, events.Event, EVENTS)):
        kinds = {var for var in vars(module).values() if isinstance(var, type) and issubclass(var, base)}
        assert set(table.values()) == kinds - {base}


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


def test_a_message_that_would_take_much_memory_is_refused_before_it_is_read():
    text = b'{"event": "probed", "facts": [%s]}' % b",".join([b"[]"] * 400_000)
    assert len(text) < MESSAGE_BYTES
    with pytest.raises(ProtocolError, match="^it takes about 61 MiB, expected at most 24$"):
        decode_event(text, "h1")


def test_a_message_that_is_too_long_is_not_sent_either():
    with pytest.raises(ProtocolError, match=r"sync: it has \d+ bytes, expected at most 4194304"):
        encode_command(commands.Sync("x" * (4 << 20)))
    with pytest.raises(ProtocolError, match="refused: it has .* bytes, expected at most 4194304"):
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
