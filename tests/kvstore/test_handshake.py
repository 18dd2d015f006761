"""The handshake lets in who knows the key, and nobody else."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmltrain.kvstore.transport.handshake import Caller, Listener
from dmltrain.kvstore.transport.wire import FrameError

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
        listener.check(caller.hello(), {"proof": "00" * 32})


def test_a_replay_is_refused():
    caller, listener = pair()
    recorded = caller.proof(listener.challenge(caller.hello()))
    with pytest.raises(FrameError, match="does not know this job's key"):
        Listener.new("j", KEY).check(caller.hello(), recorded)


def test_a_reflected_proof_is_refused():
    caller, listener = pair()
    challenge = listener.challenge(caller.hello())
    with pytest.raises(FrameError):
        listener.check(caller.hello(), {"proof": challenge["proof"]})


def test_text_that_no_encoding_takes_is_refused():
    caller, listener = pair()
    with pytest.raises(FrameError, match="does not know this job's key"):
        listener.check(caller.hello(), {"proof": "\ud800"})


def test_another_role_cannot_use_the_proof():
    caller, listener = pair()
    proof = caller.proof(listener.challenge(caller.hello()))
    with pytest.raises(FrameError):
        listener.check({**caller.hello(), "index": 0}, proof)


def test_another_job_is_refused():
    caller, listener = pair(job="other")
    with pytest.raises(FrameError, match="another job"):
        listener.challenge(caller.hello())


@given(st.dictionaries(st.sampled_from(["job", "role", "index", "nonce", "proof"]),
                       st.none() | st.integers() | st.text() | st.lists(st.integers())))
def test_malformed_hellos_and_proofs_are_refused(message):
    listener = Listener.new("j", KEY)
    with pytest.raises(FrameError):
        listener.challenge({**message, "role": "king"})
    with pytest.raises(FrameError):
        listener.check(Caller.new("j", KEY, "worker", 0).hello(), message)
