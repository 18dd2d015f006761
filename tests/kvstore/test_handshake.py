"""The handshake accepts only peers that know the key."""

import hmac
import json
from dataclasses import replace

import pytest

from dmltrain.kvstore.transport.handshake import Answers, Caller, Listener
from dmltrain.kvstore.transport.message import Challenge, Hello, Proof, decode, encode
from dmltrain.kvstore.transport.seal import Keys
from dmltrain.kvstore.transport.wire import MAX_HELLO, VERSION, FrameError, Header, Kind

KEY = b"a secret"


def pair(caller_key=KEY, listener_key=KEY, job="j"):
    return Caller.new("j", caller_key, "worker", 1, "server 0"), Listener.new(job, listener_key, "server 0")


def test_both_sides_prove_themselves():
    caller, listener = pair()
    listener.check(caller.hello(), caller.proof(listener.challenge(caller.hello())))


def test_a_caller_without_the_key_is_refused():
    caller, listener = pair(caller_key=b"guess")
    with pytest.raises(FrameError, match="does not know this job's key"):
        caller.proof(listener.challenge(caller.hello()))
    with pytest.raises(FrameError, match="does not know this job's key"):
        listener.check(caller.hello(), Proof("00" * 32))


def test_a_replay_is_refused():
    caller, listener = pair()
    recorded = caller.proof(listener.challenge(caller.hello()))
    with pytest.raises(FrameError, match="does not know this job's key"):
        Listener.new("j", KEY, "server 0").check(caller.hello(), recorded)


def test_a_reflected_proof_is_refused():
    caller, listener = pair()
    challenge = listener.challenge(caller.hello())
    with pytest.raises(FrameError):
        listener.check(caller.hello(), Proof(challenge.proof))


def test_text_that_cannot_be_encoded_is_refused():
    caller, listener = pair()
    with pytest.raises(FrameError, match="does not know this job's key"):
        listener.check(caller.hello(), Proof("\ud800"))


@pytest.mark.parametrize(
    "change",
    [
        {"role": "server"},
        {"role": "relay"},
        {"index": 0},
        {"index": 11},
        {"nonce": "00" * 16},
        {"job": "k"},
        {"listener": "server 1"},
        {"purpose": "control"},
        {"wire": "tls"},
    ],
    ids=str,
)
def test_a_proof_covers_every_field_of_the_hello(change):
    """A proof with another field is refused by both sides, also if its sender knows the key."""
    caller, listener = pair()
    challenge = listener.challenge(caller.hello())
    proof = caller.proof(challenge)
    with pytest.raises(FrameError, match="does not know this job's key"):
        listener.check(replace(caller.hello(), **change), proof)
    with pytest.raises(FrameError, match="does not know this job's key"):
        replace(caller, **change).proof(challenge)


def test_a_caller_of_another_job_does_not_trust_the_listener():
    """Two jobs of one key: the listener's proof names its job."""
    caller, listener = Caller.new("j", KEY, "worker", 1, "server 0"), Listener.new("k", KEY, "server 0")
    with pytest.raises(FrameError, match="does not know this job's key"):
        caller.proof(listener.challenge(replace(caller.hello(), job="k")))


@pytest.mark.parametrize("separator", ["", ",", ":", "1:"])
def test_fields_cannot_be_shifted_into_each_other(separator):
    """The same text, split differently into the nonces of caller and listener, is refused."""
    first, second, third = "aa", "bb", "cc"
    caller = Caller("j", KEY, "worker", 1, "server 0", "data", "plain", f"{first}{separator}{second}")
    listener = Listener("j", KEY, "server 0", "data", "plain", third)
    proof = caller.proof(listener.challenge(caller.hello()))
    other = Listener("j", KEY, "server 0", "data", "plain", f"{second}{separator}{third}")
    with pytest.raises(FrameError, match="does not know this job's key"):
        other.check(replace(caller.hello(), nonce=first), proof)
    listener.check(caller.hello(), proof)


def test_a_number_and_the_name_after_it_are_separate_fields():
    caller = Caller("j", KEY, "worker", 1, "2server 0", "data", "plain", "aa")
    listener = Listener.new("j", KEY, "2server 0")
    proof = caller.proof(listener.challenge(caller.hello()))
    with pytest.raises(FrameError, match="does not know this job's key"):
        listener.check(replace(caller.hello(), index=12, listener="server 0"), proof)


@pytest.mark.parametrize(
    "hello",
    [
        {"role": "king"},
        {"role": ""},
        {"index": -1},
        {"index": True},
        {"index": "1"},
        {"index": None},
        {"job": 1},
        {"nonce": None},
        {"nonce": "a" * 513},
    ],
    ids=str,
)
def test_a_hello_without_valid_role_index_and_nonce_is_refused(hello):
    caller, _ = pair()
    (field,) = hello
    with pytest.raises(FrameError, match=f"HELLO: .*{field}"):
        decode(Kind.HELLO, json.dumps({**vars(caller.hello()), **hello}).encode())


@pytest.mark.parametrize("role", ["scheduler", "server", "worker", "relay"])
def test_every_role_of_a_job_is_accepted(role):
    caller, listener = Caller.new("j", KEY, role, 0, "server 0"), Listener.new("j", KEY, "server 0")
    listener.check(caller.hello(), caller.proof(listener.challenge(caller.hello())))


def test_proofs_are_of_netstrings_of_all_fields():
    """As docs/protocol.md has it: another version of dmltrain, or another program, can compute them."""
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


def test_nonces_are_fresh():
    assert len({pair()[side].nonce for side in (0, 1) for _ in range(10)}) == 20


def test_another_job_is_refused():
    caller, listener = pair(job="other")
    with pytest.raises(FrameError, match="another job"):
        listener.challenge(caller.hello())


@pytest.mark.parametrize(
    "change, said",
    [
        ({"listener": "server 1"}, "the caller wants 'server 1' for 'data', but this is 'server 0' for 'data'"),
        ({"listener": "scheduler 0", "purpose": "control"}, "the caller wants 'scheduler 0' for 'control'"),
        ({"purpose": "shared memory"}, "the caller wants 'server 0' for 'shared memory'"),
        ({"wire": "tls"}, "the caller has DMLTRAIN_WIRE=tls, this process has plain: set the same value"),
    ],
    ids=str,
)
def test_a_caller_that_means_another_listener_is_refused(change, said):
    caller, listener = pair()
    with pytest.raises(FrameError) as raised:
        listener.challenge(replace(caller, **change).hello())
    assert said in str(raised.value)


def test_each_connection_has_other_keys_and_each_use_too():
    seen = set()
    for _ in range(3):
        caller, listener = pair()
        keys = caller.keys(listener.challenge(caller.hello()))
        assert keys == listener.keys(caller.hello())
        seen |= set(keys)
    assert len(seen) == 9 and all(len(each) == 32 for each in seen)


def test_another_attempt_of_a_caller_has_another_nonce():
    caller, _ = pair()
    again = caller.again()
    assert again.nonce != caller.nonce and replace(again, nonce=caller.nonce) == caller


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
        (encode(Proof("ab")), "frame kind 3 during the handshake, expected HELLO"),
        (Header(Kind.HELLO, MAX_HELLO + 1).pack(), "control frame of 4097 bytes, the limit is 4096"),
        (b"GET / HTTP/1.1\r\n" * 5, "not a dmltrain frame"),
        (encode(pair()[0].hello()) + b"x", "data before this handshake has ended"),
        (encode(Hello("k", "worker", 1, "server 0", "data", "plain", "a")), "another job"),
    ],
    ids=["no hello", "a long hello", "http", "early data", "another job"],
)
def test_what_is_no_handshake_is_refused(sent, said):
    answers = Answers(pair()[1])
    with pytest.raises(FrameError, match=said):
        answers.receive(sent)
    assert answers.accepted is None


def test_a_wrong_proof_is_never_accepted():
    caller, listener = pair(caller_key=b"guess")
    answers = Answers(listener)
    answers.receive(encode(caller.hello()))
    with pytest.raises(FrameError, match="does not know this job's key"):
        answers.receive(encode(Proof("00" * 32)))
    assert answers.accepted is None
