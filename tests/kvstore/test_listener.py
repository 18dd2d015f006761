"""Who is let in: the handshake and its seals, and what becomes of the listener when a caller or the system fails."""

import contextlib
import errno
import hmac
import os
import queue
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest

from dmltrain.base.env import Environment
from dmltrain.kvstore.transport import link, message, rendezvous, wire
from dmltrain.kvstore.transport.handshake import MEMORY, Caller, Listener, ListenerHandshake
from dmltrain.kvstore.transport.link import Closed, Link
from dmltrain.kvstore.transport.listener import LINES, MAX_CALLERS, SLOW_SECONDS, accept_loop
from dmltrain.kvstore.transport.message import decode, encode
from dmltrain.kvstore.transport.message.handshake import Accept, Challenge, Hello, Proof, Refuse
from dmltrain.kvstore.transport.seal import SIZE, Keys, Seals
from dmltrain.kvstore.transport.shared_memory import Arena
from dmltrain.kvstore.transport.wire import MAX_HELLO, VERSION, FrameError, FrameKind, Header
from tests.readable import readable
from tests.waiting import SECONDS, wait_for

ENVIRONMENT = Environment(role="server", job="job", key=b"key")
CALLER = Caller.new("job", b"key", "worker", 3, "server 0")
HTTP = b"GET / HTTP/1.1\r\n" * 5


@pytest.fixture
def listening():
    """begin(admit, complete, stays) -> the socket of an accept loop, what it serves, and an event for its end."""
    sockets = []

    def begin(admit=None, complete=None, stays=False, sock=None, daemon=True):
        sock, served, ended = sock or link.listen("127.0.0.1"), queue.Queue(), threading.Event()
        sockets.append(sock)

        def serve(*caller):
            served.put((*caller, threading.current_thread()))

        def run():
            accept_loop(sock, ENVIRONMENT, "server 0", serve, admit, complete, stays)
            ended.set()

        threading.Thread(target=run, daemon=daemon).start()
        return sock, served, ended

    yield begin
    for each in sockets:
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)  # wakes the loop
        each.close()


def greet(sock, served):
    """What a caller gets, who is let in: its link, and the listener's with role, index and thread."""
    return link.connect(sock.getsockname(), CALLER, SECONDS), *served.get(timeout=SECONDS)


def cut_off(address, data=b""):
    """Send this, and wait for the end of the connection. Returns what came before."""
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    with socket.socket(family) as peer:
        peer.connect(address)
        peer.sendall(data)
        found = b""
        while more := peer.recv(4096):
            found += more
        return found


@pytest.mark.parametrize("daemon", [True, False])
def test_callers_are_served_as_who_they_are_on_a_thread_with_their_address(listening, logged, daemon):
    """Also after unauthenticated peers, and if the loop's own thread is not a daemon."""
    sock, served, _ = listening(daemon=daemon)
    with pytest.raises(FrameError):
        link.connect(sock.getsockname(), replace(CALLER, key=b"wrong"), SECONDS)
    mine, theirs, role, index, thread = greet(sock, served)
    assert (role, index) == ("worker", 3) and served.empty()
    assert thread.name == "link {}:{}".format(*mine.sock.getsockname()) and thread.daemon
    theirs.send(Header(FrameKind.PULL).pack())
    assert mine.read_header() == Header(FrameKind.PULL)
    assert "server 0: cut off an unauthenticated peer from 127.0.0.1:" in logged.text
    for each in (mine, theirs):
        each.close()


def test_who_is_not_admitted_is_cut_off(listening, logged):
    def admit(connection):
        raise FrameError("another user's process")

    sock, served, _ = listening(admit)
    mine = link.connect(sock.getsockname(), CALLER, SECONDS)
    with pytest.raises(Closed):
        mine.read_header()
    assert served.empty()
    logged.wait_for("another user's process")
    mine.close()


def test_callers_get_in_however_many_unauthenticated_peers_stay(listening, logged):
    """Random unauthenticated peers leave for them; and so may the caller, which tries again."""
    sock, served, _ = listening()
    unauthenticated = [socket.create_connection(sock.getsockname(), SECONDS) for _ in range(3 * MAX_CALLERS)]
    greet(sock, served)[0].close()
    left = len(readable(unauthenticated, 0.0))  # their ends
    assert 2 * MAX_CALLERS <= left <= 2 * MAX_CALLERS + 2
    assert f"more than {MAX_CALLERS} handshakes at once" in logged.text
    for each in unauthenticated:
        each.close()


def test_handshakes_take_no_threads(listening):
    sock, served, _ = listening()
    before = threading.active_count()
    unauthenticated = [socket.create_connection(sock.getsockname(), SECONDS) for _ in range(MAX_CALLERS // 2)]
    for each in unauthenticated:
        each.sendall(message.encode(CALLER.hello()))
        assert each.recv(4096), "the challenge"
    assert threading.active_count() <= before
    for each in unauthenticated:
        each.close()


def test_who_is_refused_gets_the_reason(listening):
    """Also if it has sent much more than is read."""
    sock, served, _ = listening()
    for changed, said in (({"job": "other"}, "refused: .*another job"), ({"key": b"guess"}, "this job's key")):
        with pytest.raises(FrameError, match=said):
            link.connect(sock.getsockname(), replace(CALLER, **changed), SECONDS)
    assert served.empty()
    with socket.create_connection(sock.getsockname(), SECONDS) as calling:
        calling.sendall(HTTP + bytes(1 << 16))
        peer = Link(calling)
        found = peer.read_message(peer.read_header())
        assert isinstance(found, Refuse) and "not a dmltrain frame: starts with b'GET '" in found.reason


@pytest.mark.parametrize("sent", [b"", Header(FrameKind.HELLO, 9).pack()[:10], message.encode(CALLER.hello())])
def test_a_unauthenticated_peer_that_falls_silent_is_cut_off(listening, monkeypatch, logged, sent):
    """But not a caller that was accepted before."""
    sock, served, _ = listening()
    mine, theirs, *_ = greet(sock, served)
    monkeypatch.setattr(link, "HANDSHAKE_SECONDS", 0.2)
    cut_off(sock.getsockname(), sent)
    assert "silent for 0.2 s during the handshake" in logged.text
    mine.send(Header(FrameKind.PULL).pack())
    assert theirs.read_header() == Header(FrameKind.PULL)
    for each in (mine, theirs):
        each.close()


def test_a_unauthenticated_peer_that_sends_a_byte_now_and_then_is_cut_off(listening, monkeypatch):
    """The limit is for the whole handshake."""
    monkeypatch.setattr(link, "HANDSHAKE_SECONDS", 0.2)
    sock, _, _ = listening()
    sent = 0
    with socket.create_connection(sock.getsockname(), SECONDS) as calling, contextlib.suppress(OSError):
        for byte in Header(FrameKind.HELLO, 9).pack():
            calling.sendall(bytes([byte]))
            sent += 1
            time.sleep(0.05)
    assert 1 < sent < wire.HEADER_SIZE


def test_a_refused_unauthenticated_peer_that_stays_is_not_waited_for_long(listening, monkeypatch):
    """It gets less time than the handshake."""
    monkeypatch.setattr(link, "HANDSHAKE_SECONDS", SECONDS)
    sock, _, _ = listening()
    with socket.create_connection(sock.getsockname(), SECONDS) as calling:
        calling.sendall(HTTP)
        while calling.recv(4096):
            pass

        def is_cut_off():
            with contextlib.suppress(OSError):
                return not calling.sendall(b"more") and False
            return True

        wait_for(is_cut_off, "the end of the connection", SECONDS / 2)


def test_when_nobody_is_expected_a_listener_closes(listening):
    complete = threading.Event()
    sock, served, ended = listening(complete=complete)
    for _ in range(2):
        assert not ended.is_set()
        greet(sock, served)[0].close()
    complete.set()
    assert ended.wait(SECONDS) and sock.fileno() == -1


def test_when_nobody_is_expected_unauthenticated_peers_are_accepted_slowly(listening):
    """The scheduler's share of the cores belongs to the job then."""
    complete = threading.Event()
    sock, served, _ = listening(complete=complete, stays=True)
    complete.set()
    since = time.monotonic()
    for _ in range(5):
        cut_off(sock.getsockname(), HTTP)
    assert time.monotonic() - since > 4 * SLOW_SECONDS
    greet(sock, served)[0].close()


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")


@as_root
def test_a_worker_of_another_user_does_not_wait_for_a_server_that_drops_it(listening, monkeypatch):
    """It uses TCP at once."""
    monkeypatch.setattr(rendezvous, "CONNECT_SECONDS", 2 * SECONDS)
    sock, name = rendezvous.listen()
    _, served, _ = listening(sock=sock)
    caller, since = Caller.new("job", b"key", "worker", 3, "server 0", MEMORY), time.monotonic()
    os.seteuid(2002)
    try:
        assert rendezvous.connect(name, caller, Arena(1 << 20)) is None
    finally:
        os.seteuid(0)
    assert time.monotonic() - since < SECONDS and served.empty()


@as_root
def test_another_users_process_is_cut_off_before_anything_is_read(listening, logged):
    sock, name = rendezvous.listen()
    listening(sock=sock)
    program = f"import socket; s = socket.socket(socket.AF_UNIX); s.connect('\\0{name}'); print(s.recv(1))"
    command = ["setpriv", "--reuid=2002", "--regid=2002", "--clear-groups", "/usr/bin/python3", "-c", program]
    peer = subprocess.run(command, capture_output=True, text=True)
    assert peer.stdout == "b''\n", peer.stderr
    logged.wait_for("cut off an unauthenticated peer from this host: it is another user's process")


def test_unauthenticated_peers_of_this_host_are_named_so(listening, logged):
    """They call a socket without addresses."""
    sock, name = rendezvous.listen()
    _, served, _ = listening(sock=sock)
    cut_off(f"\0{name}", HTTP)
    logged.wait_for("server 0: cut off an unauthenticated peer from this host: not a dmltrain frame")
    assert served.empty()


WITHOUT_THREADS = """import os, queue, resource, socket, threading
from dmltrain.base.env import Environment
from dmltrain.kvstore.transport import link
from dmltrain.kvstore.transport.handshake import Caller
from dmltrain.kvstore.transport.link import Closed
from dmltrain.kvstore.transport.listener import accept_loop
sock, served = link.listen("127.0.0.1"), queue.Queue()
environment = Environment(role="server", job="job", key=b"key")
caller = Caller.new("job", b"key", "worker", 3, "server 0")
threading.Thread(
    target=accept_loop, args=(sock, environment, "server 0", lambda *each: served.put(each)), daemon=True
).start()
calling = socket.create_connection(sock.getsockname())
_, hard = resource.getrlimit(resource.RLIMIT_NPROC)
os.setresuid(2002, 2002, 2002)  # the limit does not hold for root
resource.setrlimit(resource.RLIMIT_NPROC, (1, hard))
try:
    link.greet(calling, caller)
except Closed:
    print("dropped")
resource.setrlimit(resource.RLIMIT_NPROC, (hard, hard))
link.connect(sock.getsockname(), caller.again(), 5.0)
print("served", *served.get(timeout=5.0)[1:])
"""


@as_root
def test_want_of_threads_is_said_and_no_end():
    ran = subprocess.run([sys.executable, "-c", WITHOUT_THREADS], capture_output=True, text=True)
    assert ran.stdout == "dropped\nserved worker 3\n", ran.stderr
    assert "server 0: cut off worker 3 from 127.0.0.1:" in ran.stderr and "can't start new thread" in ran.stderr


class Failing:
    """A listening socket whose accepts end so, each after the one before: with an error, or as they would."""

    family = socket.AF_INET

    def __init__(self, sock, *ends):
        self.sock, self.ends = sock, list(ends)

    def __getattr__(self, name):
        return getattr(self.sock, name)

    def accept(self):
        if self.ends and (number := self.ends.pop(0)):
            raise OSError(number, os.strerror(number))
        return self.sock.accept()


def test_want_of_descriptors_fills_no_log(listening, logged):
    """However often it happens; and each time a random unauthenticated peer leaves."""
    failing = Failing(link.listen("127.0.0.1"), *[errno.EMFILE, 0] * 40)
    sock, served, _ = listening(sock=failing)
    unauthenticated = [socket.create_connection(sock.getsockname(), SECONDS) for _ in range(50)]
    greet(sock, served)[0].close()
    assert failing.ends == []
    lines = logged.text.splitlines()
    assert sum("cannot accept a connection: Too many open files" in line for line in lines) == 1
    assert 0 < sum("Too many open files, and one was chosen at random" in line for line in lines) <= LINES
    for each in unauthenticated:
        each.close()


def test_unauthenticated_peers_take_no_slots_and_the_last_are_counted_when_the_listener_closes(listening, logged):
    sock, served, ended = listening()
    for _ in range(MAX_CALLERS + LINES):
        cut_off(sock.getsockname(), HTTP)
    for _ in range(2):
        greet(sock, served)[0].close()
    sock.close()
    assert ended.wait(SECONDS)
    assert re.search(rf"server 0: cut off {MAX_CALLERS} more unauthenticated peers in \d+ s", logged.text)


@pytest.mark.parametrize("last", [errno.EBADF, errno.EINVAL])
def test_want_of_descriptors_is_said_and_no_end(last, logged):
    failing, since = Failing(link.listen("127.0.0.1"), errno.EMFILE, last), time.monotonic()
    with failing.sock, socket.create_connection(failing.getsockname()):
        accept_loop(failing, ENVIRONMENT, "server 0", pytest.fail)
    assert time.monotonic() - since > 0.05, "descriptors may be free again a little later"
    assert failing.ends == []
    assert logged.text.count("server 0: cannot accept a connection: Too many open files") == 1


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
    agreed = f"{len(str(VERSION))}:{VERSION},1:j,6:worker,2:12,8:server 3,4:data,4:auth,2:aa,3:bbb,"
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
    challenge = decode(FrameKind.CHALLENGE, first[Header.unpack(first[:68]).length * -1 :])
    assert isinstance(challenge, Challenge) and answers.accepted is None
    return deliver(encode(caller.proof(challenge)))


@pytest.mark.parametrize("size", [1, 7, 68, 1000])
def test_bytes_may_arrive_in_any_pieces(size):
    caller, listener = pair()
    answers = ListenerHandshake(listener)
    assert Header.unpack(answered(caller, answers, size)[:68]).kind == FrameKind.ACCEPT
    assert answers.accepted == caller.hello()


@pytest.mark.parametrize(
    "sent, said",
    [
        (encode(Proof("ab")), "frame kind 3 .*expected HELLO"),
        (encode(Accept()), "frame kind 4 .*expected HELLO"),
        (Header(FrameKind.PULL).pack(), f"frame kind {FrameKind.PULL} .*expected HELLO"),
        (Header(FrameKind.HELLO, MAX_HELLO + 1).pack(), "4097 bytes, the limit is 4096"),
        (b"GET / HTTP/1.1\r\n" * 5, "not a dmltrain frame"),
        (encode(pair()[0].hello()) + b"x", "data before .* has ended"),
        (encode(Hello("k", "worker", 1, "server 0", "data", "plain", "a")), "another job"),
    ],
    ids=["no hello", "another message", "a pull", "a long hello", "http", "early data", "another job"],
)
def test_what_is_no_handshake_is_refused(sent, said):
    """In place of a hello, and a wrong proof after one."""
    answers, others = ListenerHandshake(pair()[1]), ListenerHandshake(pair()[1])
    others.receive(encode(pair()[0].hello()))
    for each, data, why in ((answers, sent, said), (others, encode(Proof("00" * 32)), UNKNOWN)):
        with pytest.raises(FrameError, match=why):
            each.receive(data)
        assert each.accepted is None


ONE, OTHER = b"1" * 32, b"2" * 32
FRAMES = [
    (Header(FrameKind.CONTROL, 3).pack(), b"abc"),
    (Header(FrameKind.DONE).pack(),),
    (Header(FrameKind.ERROR, 1).pack(), b"x"),
]


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
        ([], lambda sealed: ((Header(FrameKind.ERROR, 3).pack(), b"abc"), sealed[0][1])),
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
@pytest.mark.parametrize("kind", FrameKind)
def test_control_frames_carry_seals_and_data_frames_on_request(every, kind):
    named = (
        FrameKind.CONTROL,
        FrameKind.DECLARE,
        FrameKind.OPTIMIZER,
        FrameKind.DONE,
        FrameKind.ERROR,
        FrameKind.LEAVE,
        FrameKind.HOLD,
    )
    assert ends(every)[0].cover(Header(kind).pack()) == (kind <= 15 or kind in named or every)
