"""Frames: golden bytes, and nothing but FrameError for anything else."""

import zlib
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dmltrain.kvstore import codec
from dmltrain.kvstore.transport import wire
from dmltrain.kvstore.transport.wire import HEADER_SIZE, Flag, FrameError, Header, Kind, VersionError

GOLDEN = bytes.fromhex(
    "444d4c5408210003"  # DMLT, version 8, PUSH, float32, in shared memory and asking for the value
    "00000003"  # view 3
    "00000007"
    "00000002"  # worker 3, key 7, slice 2
    "000000000000000c"
    "3fb999999999999a"
    "0000000000000400"  # round 12, learning rate 0.1, 1024 bytes
    "0000000000100040"
    "3e800000"
    "3f000000"  # at 1 MiB + 64, waited 0.25 s, worked 0.5 s
    "fffffffe"  # priority -2
)


ABOVE_ALL = max(codec.make({"type": kind}).number for kind in codec.TYPES if kind != "none") + 1


def test_the_layout_is_stable():
    packed = Header(Kind.PUSH, 1024, 3, 7, 2, 12, 0.1, 0, Flag.SHARED | Flag.PULL, 2**20 + 64, 0.25, 0.5, -2).pack()
    assert packed == GOLDEN + zlib.crc32(GOLDEN).to_bytes(4, "big")
    assert len(packed) == wire.HEADER_SIZE == 68


@given(
    st.sampled_from(list(Kind)),
    *[st.integers(0, 2**32 - 1)] * 3,
    st.integers(0, 2**63),
    st.integers(0, 2**63),
    st.floats(allow_nan=False),
    st.integers(0, 6),
    st.integers(0, 7),
    st.integers(0, 2**63),
    *[st.floats(0, 1e6, width=32, allow_subnormal=False)] * 2,
    st.integers(-(2**31), 2**31 - 1),
)
@example(Kind.HELLO, 0, 0, 0, 0, 0, 0.0, 0, 0, 0, 1.301045788681166e-38, 0.5, 0)
def test_headers_survive_packing_and_parsing(
    kind, view, key, index, clock, length, number, dtype, flags, offset, waited, worked, priority
):
    header = Header(int(kind), length, view, key, index, clock, number, dtype, flags, offset, waited, worked, priority)
    assert Header.unpack(header.pack()) == header


@given(st.binary(max_size=128))
def test_random_bytes_are_refused(data):
    with pytest.raises(FrameError):
        Header.unpack(data)


@given(st.integers(0, 67), st.integers(1, 255))
def test_any_changed_byte_is_refused(position, change):
    damaged = bytearray(Header(Kind.PULL, 0, 1, 2, 3, 4).pack())
    damaged[position] ^= change
    with pytest.raises(FrameError):
        Header.unpack(damaged)


def test_the_error_for_another_version_names_it():
    body = bytearray(Header(Kind.HELLO).pack()[:-4])
    body[4] = 9
    with pytest.raises(VersionError, match="version 9, expected 8"):
        Header.unpack(bytes(body) + zlib.crc32(body).to_bytes(4, "big"))


@pytest.mark.parametrize(
    "position, value, message",
    [
        (5, 250, "unknown frame kind 250"),
        (6, ABOVE_ALL, f"unknown element type {ABOVE_ALL}"),
        (7, 8, "unknown flags 8"),
    ],
)
def test_a_wrong_field_is_named(position, value, message):
    body = bytearray(Header(Kind.PUSH).pack()[:-4])
    body[position] = value
    with pytest.raises(FrameError, match=message):
        Header.unpack(bytes(body) + zlib.crc32(body).to_bytes(4, "big"))


def test_valid_headers_survive_and_all_others_are_refused():
    read = [(7, 0, 2**40), (2**32 - 1, 3, 0)]
    assert list(wire.parse_release(wire.release(read))) == read
    with pytest.raises(FrameError, match="a release of 17 bytes, expected a multiple of 16"):
        wire.parse_release(bytes(17))


def test_the_slices_of_a_group_survive_and_other_sizes_are_refused():
    content = [(7, 0, 0), (2**32 - 1, 3, -5), (8, 1, 2**40)]
    packed = wire.group(content)
    assert packed[16:32].hex() == "ffffffff00000003fffffffffffffffb"
    assert wire.parse_group(packed) == content
    whole = wire.group([(0, 0, 0)] * wire.MAX_MEMBERS)
    assert len(wire.parse_group(whole)) == wire.MAX_MEMBERS and len(whole) == wire.MAX_GROUP
    for wrong in (b"", packed[:-1], whole + whole[:16]):
        with pytest.raises(FrameError, match=f"a group of {len(wrong)} bytes, expected 1 to 1024 times 16"):
            wire.parse_group(wrong)


def test_offsets_survive_and_another_number_of_them_is_refused():
    packed = wire.offsets([0, 64, 2**63])
    assert packed[8:16].hex() == "0000000000000040"
    assert wire.parse_offsets(packed, 3) == (0, 64, 2**63)
    with pytest.raises(FrameError, match="24 bytes of offsets for a group of 2 slices, expected 16"):
        wire.parse_offsets(packed, 2)


def test_numbers_of_the_protocol_stay():
    assert {kind.name: int(kind) for kind in Kind} == {
        "HELLO": 1,
        "CHALLENGE": 2,
        "PROOF": 3,
        "ACCEPT": 4,
        "REFUSE": 5,
        "CONTROL": 16,
        "DECLARE": 17,
        "OPTIMIZER": 18,
        "DONE": 19,
        "ERROR": 20,
        "LEAVE": 21,
        "CONSISTENCY": 22,
        "HOLD": 23,
        "INIT": 32,
        "PUSH": 33,
        "PULL": 34,
        "VALUE": 35,
        "READ_STATE": 36,
        "STATE": 37,
        "RELEASE": 38,
        "PROBE": 39,
        "GROUP": 40,
        "PUSH_GROUP": 41,
        "PULL_GROUP": 42,
        "VALUE_GROUP": 43,
        "RELEASE_GROUP": 44,
        "READ_STEPS": 45,
        "READ_GONE": 46,
    }
    assert (Flag.SHARED, Flag.PULL, Flag.OFFSETS) == (1, 2, 4) and wire.DTYPES == ("float32", "float64")
    assert (wire.MAX_CONTROL, wire.MAX_PROBE, wire.MAX_HELLO) == (8 << 20, 1 << 20, 4096)
    assert (wire.MAX_MEMBERS, wire.MAX_GROUP, wire.MAX_OFFSETS) == (1024, 16 * 1024, 8 * 1024)


@pytest.mark.parametrize(
    "header, followed",
    [
        (Header(Kind.PULL), False),
        (Header(Kind.PUSH, 1), True),
        (Header(Kind.PUSH, 1, flags=Flag.PULL), True),
        (Header(Kind.PUSH, 1, flags=Flag.SHARED), False),
        (Header(Kind.PUSH, 0, flags=Flag.PULL), False),
        (Header(Kind.PUSH_GROUP, 8, flags=Flag.OFFSETS | Flag.PULL), True),
    ],
)
def test_a_payload_follows_unless_there_is_none_or_it_is_shared(header, followed):
    assert header.is_followed == followed


def test_unused_fields_of_a_header_are_zero():
    assert Header(Kind.PULL) == Header(int(Kind.PULL), *[0] * (len(Header._fields) - 1))


def test_documents_state_the_size_of_the_header():
    docs = Path(__file__).parents[2] / "docs"
    assert f"A frame is a header of {HEADER_SIZE} bytes" in (docs / "protocol.md").read_text()
    decision = (docs / "decisions/0002-payload-checksum.md").read_text()
    assert f"the {HEADER_SIZE - 4} bytes before the checksum, of the header's {HEADER_SIZE}, cost nothing" in decision
