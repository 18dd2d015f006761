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
    "00000003 00000007 00000002"  # view 3, key 7, slice 2
    "000000000000000c 3fb999999999999a 0000000000000400"  # round 12, learning rate 0.1, 1024 bytes
    "0000000000100040 3e800000 3f000000"  # at 1 MiB + 64, waited 0.25 s, worked 0.5 s
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


@pytest.mark.parametrize(
    "position, value, error, said",
    [
        (4, 9, VersionError, "version 9, expected 8"),
        (5, 250, FrameError, "unknown frame kind 250"),
        (6, ABOVE_ALL, FrameError, f"unknown element type {ABOVE_ALL}"),
        (7, 8, FrameError, "unknown flags 8"),
    ],
)
def test_another_version_and_a_wrong_field_are_named(position, value, error, said):
    body = bytearray(Header(Kind.PUSH).pack()[:-4])
    body[position] = value
    with pytest.raises(error, match=said):
        Header.unpack(bytes(body) + zlib.crc32(body).to_bytes(4, "big"))


def test_releases_groups_and_offsets_survive_and_those_of_other_sizes_are_refused():
    read = [(7, 0, 2**40), (2**32 - 1, 3, 0)]
    assert list(wire.parse_release(wire.release(read))) == read
    with pytest.raises(FrameError, match="a release of 17 bytes, .* multiple of 16"):
        wire.parse_release(bytes(17))
    content = [(7, 0, 0), (2**32 - 1, 3, -5), (8, 1, 2**40)]
    packed = wire.group(content)
    assert packed[16:32].hex() == "ffffffff00000003fffffffffffffffb"
    assert wire.parse_group(packed) == content
    whole = wire.group([(0, 0, 0)] * wire.MAX_MEMBERS)
    assert len(wire.parse_group(whole)) == wire.MAX_MEMBERS and len(whole) == wire.MAX_GROUP
    for wrong in (b"", packed[:-1], whole + whole[:16]):
        with pytest.raises(FrameError, match=f"a group of {len(wrong)} bytes, expected 1 to 1024 times 16"):
            wire.parse_group(wrong)
    packed = wire.offsets([0, 64, 2**63])
    assert packed[8:16].hex() == "0000000000000040"
    assert wire.parse_offsets(packed, 3) == (0, 64, 2**63)
    with pytest.raises(FrameError, match="24 bytes of offsets .* 2 slices, expected 16"):
        wire.parse_offsets(packed, 2)


def test_numbers_of_the_protocol_stay():
    numbered = {
        1: "HELLO CHALLENGE PROOF ACCEPT REFUSE",
        16: "CONTROL DECLARE OPTIMIZER DONE ERROR LEAVE CONSISTENCY HOLD",
        32: "INIT PUSH PULL VALUE READ_STATE STATE RELEASE PROBE GROUP PUSH_GROUP PULL_GROUP VALUE_GROUP RELEASE_GROUP",
        45: "READ_STEPS READ_GONE",
    }
    expected = {name: n for first, names in numbered.items() for n, name in enumerate(names.split(), first)}
    assert {kind.name: int(kind) for kind in Kind} == expected
    assert (Flag.SHARED, Flag.PULL, Flag.OFFSETS) == (1, 2, 4) and wire.DTYPES == ("float32", "float64")
    assert (wire.MAX_CONTROL, wire.MAX_PROBE, wire.MAX_HELLO) == (8 << 20, 1 << 20, 4096)
    assert (wire.MAX_MEMBERS, wire.MAX_GROUP, wire.MAX_OFFSETS) == (1024, 16 * 1024, 8 * 1024)
    assert Header(Kind.PULL) == Header(int(Kind.PULL), *[0] * (len(Header._fields) - 1)), "unused fields are zero"


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


def test_documents_state_the_size_of_the_header():
    docs = Path(__file__).parents[2] / "docs"
    assert f"A frame is a header of {HEADER_SIZE} bytes" in (docs / "protocol.md").read_text()
    decision = (docs / "decisions/0002-payload-checksum.md").read_text()
    assert f"the {HEADER_SIZE - 4} bytes before the checksum, of the header's {HEADER_SIZE}, cost nothing" in decision
