"""The handshake accepts only peers that know the key, and seals show frames that are not the peer's next ones."""

import hmac
import struct
from dataclasses import replace

import pytest

from dmltrain.kvstore.transport.handshake import Answers, Caller, Listener
from dmltrain.kvstore.transport.message import Accept, Challenge, Hello, Proof, decode, encode
from dmltrain.kvstore.transport.seal import SIZE, Keys, Seals
from dmltrain.kvstore.transport.wire import MAX_HELLO, VERSION, FrameError, Header, Kind

KEY = b"a secret"


UNKNOWN = "does not know this job's key"


def pair(caller_key=KEY, listener_key=KEY, job="j", role="worker"):
    return Caller.new("j", caller_key, role, 1, "server 0"), Listener.new(job, listener_key, "server 0")


@pytest.mark.parametrize("role", ["scheduler", "server", "worker", "relay"])
def test_both_sides_prove_themselves(role):
    caller, listener = pair(role=role)
    listener.check(caller.hello(), caller.proof(listener.challenge(caller.hello())))


def test_who_does_not_know_the_key_is_refused():
    """Also with a replayed proof, or the listener's own, or a text that cannot be encoded."""
    caller, listener = pair(caller_key=b"guess")
    with pytest.raises(FrameError, match=UNKNOWN):
        caller.proof(listener.challenge(caller.hello()))
    caller, earlier = pair()
    recorded = caller.proof(earlier.challenge(caller.hello()))
    reflected = Proof(listener.challenge(caller.hello()).proof)
    for proof in (Proof("00" * 32), recorded, reflected, Proof("\ud800")):
        with pytest.raises(FrameError, match=UNKNOWN):
            listener.check(caller.hello(), proof)


@pytest.mark.parametrize(
    "change",
    [
        *({"role": each} for each in ("server", "relay")),
        *({"index": each} for each in (0, 11)),
        *({"nonce": "00" * 16}, {"job": "k"}, {"listener": "server 1"}, {"purpose": "control"}, {"wire": "tls"}),
    ],
    ids=str,
)
def test_a_proof_covers_every_field_of_the_hello(change):
    """A proof with another field is refused by both sides, also if its sender knows the key."""
    caller, listener = pair()
    challenge = listener.challenge(caller.hello())
    proof = caller.proof(challenge)
    with pytest.raises(FrameError, match=UNKNOWN):
        listener.check(replace(caller.hello(), **change), proof)
    with pytest.raises(FrameError, match=UNKNOWN):
        replace(caller, **change).proof(challenge)


def test_proofs_are_of_netstrings_of_all_fields():
    """As docs/protocol.md has it: another version of dmltrain, or another program, can compute them. So a proof is of
    one division of its text into fields only."""
    caller = Caller("j", KEY, "worker", 12, "server 3", "data", "auth", "aa")
    listener = Listener("j", KEY, "server 3", "data", "auth", "bbb")
    challenge = listener.challenge(caller.hello())
    agreed = f"1:{VERSION},1:j,6:worker,2:12,8:server 3,4:data,4:auth,2:aa,3:bbb,"
    for side, proof in (("8:listener", challenge.proof), ("6:caller", caller.proof(challenge).proof)):
        assert proof == hmac.new(KEY, f"{side},{agreed}".encode(), "sha256").hexdigest()
    extracted = hmac.new(bytes(32), KEY, "sha256").digest()
    uses = "13:caller frames", "15:listener frames", "3:TLS"
    derived = [hmac.new(extracted, f"{use},{agreed}\1".encode(), "sha256").digest() for use in uses]
    assert caller.keys(challenge) == listener.keys(caller.hello()) == Keys(*derived)


@pytest.mark.parametrize(
    "change, said",
    [
        ({"listener": "server 1"}, "wants 'server 1' for 'data', but this is 'server 0' for 'data'"),
        ({"listener": "scheduler 0", "purpose": "control"}, "wants 'scheduler 0' for 'control'"),
        ({"purpose": "shared memory"}, "wants 'server 0' for 'shared memory'"),
        ({"wire": "tls"}, "DMLTRAIN_WIRE=tls, this process has plain"),
        ({"job": "k"}, "another job"),
    ],
    ids=str,
)
def test_a_caller_that_means_another_listener_is_refused(change, said):
    caller, listener = pair()
    with pytest.raises(FrameError, match=said):
        listener.challenge(replace(caller, **change).hello())


def test_each_connection_has_other_nonces_and_keys_and_each_use_too():
    """Another attempt of a caller as well."""
    seen, nonces = set(), set()
    for _ in range(3):
        caller, listener = pair()
        again = caller.again()
        assert replace(again, nonce=caller.nonce) == caller
        nonces |= {caller.nonce, listener.nonce, again.nonce}
        keys = caller.keys(listener.challenge(caller.hello()))
        assert keys == listener.keys(caller.hello())
        seen |= set(keys)
    assert len(seen) == len(nonces) == 9 and all(len(each) == 32 for each in seen)


def answered(caller, answers, size):
    """The listener's side of a handshake whose bytes arrive `size` at a time."""

    def deliver(data):
        return b"".join([answers.receive(data[start : start + size]) for start in range(0, len(data), size)])

    first = deliver(encode(caller.hello()))
    challenge = decode(Kind.CHALLENGE, first[Header.unpack(first[:68]).length * -1 :])
    assert isinstance(challenge, Challenge) and answers.accepted is None
    return deliver(encode(caller.proof(challenge)))


@pytest.mark.parametrize("size", [1, 7, 68, 1000])
def test_bytes_may_arrive_in_any_pieces(size):
    caller, listener = pair()
    answers = Answers(listener)
    assert Header.unpack(answered(caller, answers, size)[:68]).kind == Kind.ACCEPT
    assert answers.accepted == caller.hello()


@pytest.mark.parametrize(
    "sent, said",
    [
        (encode(Proof("ab")), "frame kind 3 .*expected HELLO"),
        (encode(Accept()), "frame kind 4 .*expected HELLO"),
        (Header(Kind.PULL).pack(), f"frame kind {Kind.PULL} .*expected HELLO"),
        (Header(Kind.HELLO, MAX_HELLO + 1).pack(), "4097 bytes, the limit is 4096"),
        (b"GET / HTTP/1.1\r\n" * 5, "not a dmltrain frame"),
        (encode(pair()[0].hello()) + b"x", "data before .* has ended"),
        (encode(Hello("k", "worker", 1, "server 0", "data", "plain", "a")), "another job"),
    ],
    ids=["no hello", "another message", "a pull", "a long hello", "http", "early data", "another job"],
)
def test_what_is_no_handshake_is_refused(sent, said):
    """In place of a hello, and a wrong proof after one."""
    answers, others = Answers(pair()[1]), Answers(pair()[1])
    others.receive(encode(pair()[0].hello()))
    for each, data, why in ((answers, sent, said), (others, encode(Proof("00" * 32)), UNKNOWN)):
        with pytest.raises(FrameError, match=why):
            each.receive(data)
        assert each.accepted is None


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
