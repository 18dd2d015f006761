"""The handshake accepts only peers that know the key."""

import hmac
import json
from dataclasses import replace

import pytest

from dmltrain.kvstore.transport.handshake import Caller, Listener
from dmltrain.kvstore.transport.message import Proof, decode
from dmltrain.kvstore.transport.wire import FrameError, Kind

KEY = b"a secret"


def pair(caller_key=KEY, listener_key=KEY, job="j"):
    return Caller.new("j", caller_key, "worker", 1), Listener.new(job, listener_key)


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
        Listener.new("j", KEY).check(caller.hello(), recorded)


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
    [{"role": "server"}, {"role": "relay"}, {"index": 0}, {"index": 11}, {"nonce": "00" * 16}, {"job": "k"}],
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
    caller, listener = Caller.new("j", KEY, "worker", 1), Listener.new("k", KEY)
    with pytest.raises(FrameError, match="does not know this job's key"):
        caller.proof(listener.challenge(replace(caller.hello(), job="k")))


@pytest.mark.parametrize("separator", ["", ",", ":", "1:"])
def test_fields_cannot_be_shifted_into_each_other(separator):
    """The same text, split differently into the nonces of caller and listener, is refused."""
    first, second, third = "aa", "bb", "cc"
    caller = Caller("j", KEY, "worker", 1, f"{first}{separator}{second}")
    listener = Listener("j", KEY, third)
    proof = caller.proof(listener.challenge(caller.hello()))
    other = Listener("j", KEY, f"{second}{separator}{third}")
    with pytest.raises(FrameError, match="does not know this job's key"):
        other.check(replace(caller.hello(), nonce=first), proof)
    listener.check(caller.hello(), proof)


def test_a_number_and_the_nonce_after_it_are_separate_fields():
    caller, listener = Caller("j", KEY, "worker", 1, "2aa"), Listener.new("j", KEY)
    proof = caller.proof(listener.challenge(caller.hello()))
    with pytest.raises(FrameError, match="does not know this job's key"):
        listener.check(replace(caller.hello(), index=12, nonce="aa"), proof)


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
    caller, listener = Caller.new("j", KEY, role, 0), Listener.new("j", KEY)
    listener.check(caller.hello(), caller.proof(listener.challenge(caller.hello())))


def test_proofs_are_of_netstrings_of_all_fields():
    """As docs/protocol.md has it: another version of dmltrain, or another program, can compute them."""
    caller, listener = Caller("j", KEY, "worker", 12, "aa"), Listener("j", KEY, "bbb")
    challenge = listener.challenge(caller.hello())
    for side, proof in (("8:listener", challenge.proof), ("6:caller", caller.proof(challenge).proof)):
        text = f"{side},1:j,6:worker,2:12,2:aa,3:bbb,".encode()
        assert proof == hmac.new(KEY, text, "sha256").hexdigest()


def test_nonces_are_fresh():
    assert len({pair()[side].nonce for side in (0, 1) for _ in range(10)}) == 20


def test_another_job_is_refused():
    caller, listener = pair(job="other")
    with pytest.raises(FrameError, match="another job"):
        listener.challenge(caller.hello())
