"""Seals: a frame that is not the next one from the peer of the handshake is noticed."""

import hmac
import struct

import pytest

from dmltrain.kvstore.transport.seal import SIZE, Seals
from dmltrain.kvstore.transport.wire import FrameError, Header, Kind

ONE, OTHER = b"1" * 32, b"2" * 32
FRAMES = [(Header(Kind.CONTROL, 3).pack(), b"abc"), (Header(Kind.DONE).pack(),), (Header(Kind.ERROR, 1).pack(), b"x")]


def ends(every=False):
    return Seals(ONE, OTHER, every), Seals(OTHER, ONE, every)


def test_frames_in_order_are_the_peers_and_a_seal_is_a_truncated_hmac_of_number_header_and_payload():
    """As docs/protocol.md has it."""
    sender, receiver = ends()
    for number, frame in enumerate(FRAMES * 3):
        sealed = sender.seal(frame)
        assert sealed == hmac.new(ONE, struct.pack("!Q", number) + b"".join(frame), "sha256").digest()[:16]
        receiver.check(frame, sealed)
    assert SIZE == 16


@pytest.mark.parametrize(
    "good, bad",
    [
        ([], lambda sealed: sealed[1]),
        ([0], lambda sealed: sealed[0]),
        ([0], lambda sealed: sealed[2]),
        ([], lambda sealed: ((FRAMES[0][0], b"abd"), sealed[0][1])),
        ([], lambda sealed: ((Header(Kind.ERROR, 3).pack(), b"abc"), sealed[0][1])),
        ([], lambda sealed: (FRAMES[0], bytes(SIZE))),
        ([], lambda sealed: (FRAMES[0], b"")),
    ],
    ids=["reordered", "repeated", "one left out", "another payload", "another header", "made up", "none"],
)
def test_anything_else_is_noticed(good, bad):
    sender, receiver = ends()
    sealed = [(frame, sender.seal(frame)) for frame in FRAMES]
    for number in good:
        receiver.check(*sealed[number])
    with pytest.raises(FrameError, match="changed, injected, repeated or lost"):
        receiver.check(*bad(sealed))
    with pytest.raises(FrameError):
        sender.check(*sealed[0])  # a frame does not come back as the peer's


@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize("kind", Kind)
def test_control_frames_carry_seals_and_data_frames_on_request(every, kind):
    handshakes_and_control = {each for each in Kind if each <= 15} | {
        *(Kind.CONTROL, Kind.DECLARE, Kind.OPTIMIZER, Kind.DONE, Kind.ERROR, Kind.LEAVE, Kind.CONSISTENCY, Kind.HOLD)
    }
    control = kind in handshakes_and_control
    assert ends(every)[0].cover(Header(kind).pack()) == (control or every)
