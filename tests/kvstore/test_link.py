"""Links: what one end sends arrives at the other, and both notice the end of the connection."""

import socket
import threading
from types import SimpleNamespace

import pytest

from dmltrain.kvstore.transport import link, message, wire
from dmltrain.kvstore.transport.handshake import Caller, Listener
from dmltrain.kvstore.transport.link import Closed, Link
from dmltrain.kvstore.transport.message import Accept, Hello
from dmltrain.kvstore.transport.wire import Flag, FrameError, Header, Kind

DEADLINE = 10.0
CALLER = Caller.new("job", b"key", "worker", 3)


def tcp():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        sock = socket.create_connection(listening.getsockname())
        other, _ = listening.accept()
    return sock, other


WAYS = {"tcp": tcp, "unix": socket.socketpair}


@pytest.fixture(params=WAYS)
def ends(request):
    """Both ends of a connection after its handshake."""
    made = [Link(sock) for sock in WAYS[request.param]()]
    for each in made:
        each.settle()
    yield made
    for each in made:
        each.close()


def aside(action):
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    return thread


def data(size):
    return bytes(range(256)) * (size // 256) + bytes(size % 256)


@pytest.mark.parametrize(
    "sizes",
    [(68,), (68, 1000), (68, 5 << 20), (68, 0, 68, 3 << 20, 68, 100), (1 << 20, (1 << 20) + 1, 10), (68,) * 900],
    ids=str,
)
def test_frames_arrive_in_order_and_are_counted(ends, sizes):
    sender, receiver = ends
    pieces = [data(size) for size in sizes]
    counted = []
    sender.window = SimpleNamespace(sent=counted.append)
    sending = aside(lambda: sender.send(*map(memoryview, pieces)))
    for piece in pieces:
        target = bytearray(len(piece))
        receiver.read_into(memoryview(target))
        assert target == piece
    sending.join(DEADLINE)
    assert sender.bytes_sent == sum(counted) == receiver.bytes_received == sum(sizes)
    assert (receiver.bytes_sent, sender.bytes_received) == (0, 0)


def test_an_end_between_frames_differs_from_an_end_inside_a_frame(ends):
    sender, receiver = ends
    sender.send(Header(Kind.PULL, clock=7).pack(), bytes(3))
    sender.cut()
    assert receiver.read_header() == Header(Kind.PULL, clock=7)
    with pytest.raises(Closed, match="stream ended after 3 of 68 bytes of a frame"):
        receiver.read_header()
    with pytest.raises(Closed, match="^end of stream$"):
        receiver.read_header()
    with pytest.raises(Closed):
        for _ in range(100):
            receiver.send(bytes(1 << 16))


def test_cutting_a_link_wakes_its_reader(ends):
    reader, _ = ends
    said = []

    def read():
        with pytest.raises(Closed) as raised:
            reader.read_header()
        said.append(str(raised.value))

    reading = aside(read)
    reader.cut()
    reading.join(DEADLINE)
    assert said == ["end of stream"]


def test_arrived_headers_are_read_together_up_to_one_with_a_payload():
    sender, receiver = (Link(sock) for sock in socket.socketpair())
    receiver.settle()
    pull, shared = Header(Kind.PULL), Header(Kind.PUSH, 9, flags=Flag.SHARED)
    followed = Header(Kind.RELEASE, 5)
    sender.send(*(each.pack() for each in (pull, shared, pull, followed)), b"12345", pull.pack())
    assert receiver.read_headers(2) == [pull, shared]
    assert receiver.read_headers(9) == [pull, followed]
    assert receiver.read_payload(followed) == b"12345"
    assert receiver.read_headers(9) == [pull]
    assert receiver.bytes_received == 5 * wire.HEADER_SIZE + 5
    sender.close()
    with pytest.raises(Closed, match="end of stream"):
        receiver.read_headers(9)
    receiver.close()


def test_a_payload_longer_than_its_limit_is_not_read(ends):
    sender, receiver = ends
    sender.send(b"12345")
    with pytest.raises(FrameError, match="control frame of 6 bytes, the limit is 5"):
        receiver.read_payload(Header(Kind.CONTROL, 6), 5)
    assert receiver.read_payload(Header(Kind.CONTROL, 5), 5) == b"12345"


def test_a_full_socket_leaves_the_unsent_rest():
    sender, receiver = (Link(sock) for sock in socket.socketpair())
    sender.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
    whole = data(1 << 20)
    first = sender.send_now(whole)
    assert 0 < first < len(whole)
    assert sender.send_now(whole[first:]) == 0
    assert sender.bytes_sent == first
    target = bytearray(first)
    receiver.read_into(memoryview(target))
    assert target == whole[:first]
    sender.cut()
    assert sender.send_now(whole) == len(whole), "the reader gets it"
    with pytest.raises(Closed, match="end of stream"):
        sender.read_header()
    sender.close()
    receiver.close()


def test_small_frames_are_sent_without_delay():
    """Nagle's algorithm would delay small frames. Lost peers are detected without traffic."""
    for sock in tcp():
        end = Link(sock)
        end.settle()
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) and end.window is None
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        end.close()


def test_a_port_can_be_listened_on_again_at_once():
    """The kernel keeps the last connection for a minute on the side that closed first."""
    listening = link.listen("127.0.0.1")
    port = listening.getsockname()[1]
    listening.close()
    listening = link.listen("127.0.0.1", port)
    calling = socket.create_connection(("127.0.0.1", port))
    accepted, _ = listening.accept()
    accepted.close()
    calling.close()
    listening.close()
    with link.listen("127.0.0.1", port) as again:
        assert again.getsockname() == ("127.0.0.1", port)


def test_a_closed_port_is_an_os_error():
    with link.listen("127.0.0.1") as listening:
        address = listening.getsockname()
    with pytest.raises(ConnectionRefusedError):
        link.connect(address, CALLER, DEADLINE)


# -- the handshake ----------------------------------------------------------------------------------------------------


def accepting(sock, listener=None):
    """Accept in a thread; the result is (link, role, index) or the exception."""
    outcome = []

    def accept():
        try:
            outcome.append(link.accept(sock, listener or Listener.new("job", b"key")))
        except (FrameError, Closed) as error:
            outcome.append(error)

    thread = aside(accept)
    return lambda: (thread.join(DEADLINE), outcome[0])[1]


@pytest.mark.parametrize("way", WAYS)
def test_a_caller_is_accepted_with_its_proved_role_and_index(way):
    calling, listening = WAYS[way]()
    accepted = accepting(listening)
    mine = link.greet(calling, CALLER)
    theirs, role, index = accepted()
    assert (role, index) == ("worker", 3)
    mine.settle()
    theirs.settle(answers=True)
    theirs.send(Header(Kind.PULL).pack())
    assert mine.read_header() == Header(Kind.PULL)
    mine.close()
    theirs.close()


@pytest.mark.parametrize(
    "caller, listener, said",
    [
        (Caller.new("other", b"key", "worker", 3), None, "refused: 'the caller belongs to another job'"),
        (Caller.new("job", b"guess", "worker", 3), None, "the peer does not know this job's key"),
    ],
)
def test_a_refused_caller_gets_the_reason(caller, listener, said):
    calling, listening = tcp()
    accepted = accepting(listening, listener)
    with pytest.raises(FrameError) as raised:
        link.greet(calling, caller)
    assert said in str(raised.value)
    assert calling.fileno() == -1, "closed"
    assert isinstance(accepted(), (FrameError, Closed))
    assert listening.fileno() == -1


@pytest.mark.parametrize(
    "sent, said",
    [
        (Header(Kind.PULL).pack(), f"frame kind {Kind.PULL} during the handshake, expected HELLO"),
        (message.encode(Accept()), f"frame kind {Kind.ACCEPT} during the handshake, expected HELLO"),
        (Header(Kind.HELLO, wire.MAX_HELLO + 1).pack(), "control frame of 4097 bytes, the limit is 4096"),
        (b"GET / HTTP/1.1\r\n" * 5, "not a dmltrain frame: starts with b'GET '"),
        (message.encode(Hello("job", "worker", 0, "a")) + Header(Kind.PULL).pack(), "expected PROOF"),
    ],
    ids=["a pull", "another message", "a long hello", "http", "no proof"],
)
def test_an_unauthenticated_peer_gets_the_reason_for_its_refusal(sent, said):
    calling, listening = tcp()
    accepted = accepting(listening)
    calling.sendall(sent + bytes(1 << 16))  # much more than is read
    error = accepted()
    assert isinstance(error, FrameError) and said in str(error)
    peer = Link(calling)
    found = peer.read_message(peer.read_header())
    if isinstance(found, message.Challenge):
        found = peer.read_message(peer.read_header())
    assert isinstance(found, message.Refuse) and said in found.reason
    peer.close()


def test_a_silent_caller_times_out(monkeypatch):
    monkeypatch.setattr(link, "HANDSHAKE_SECONDS", 0.2)
    for way in WAYS.values():
        calling, listening = way()
        assert isinstance(accepting(listening)(), Closed)
        assert calling.recv(1) == b"", "cut off"
        calling.close()


def test_a_caller_times_out_without_an_answer(monkeypatch):
    monkeypatch.setattr(link, "HANDSHAKE_SECONDS", 0.2)
    calling, listening = tcp()
    with pytest.raises(Closed, match="silent for 0.2 s during the handshake"):
        link.greet(calling, CALLER)
    listening.close()


def test_sockets_have_no_timeout_after_the_handshake(monkeypatch):
    monkeypatch.setattr(link, "HANDSHAKE_SECONDS", 0.2)
    calling, listening = tcp()
    accepted = accepting(listening)
    mine, theirs = link.greet(calling, CALLER), accepted()[0]
    for each in (mine, theirs):
        each.settle()
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            assert each.sock.getsockopt(socket.SOL_SOCKET, option, 16) == bytes(16)
        each.close()
