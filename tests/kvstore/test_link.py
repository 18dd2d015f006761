"""Links: what one end sends arrives at the other, and both notice the end. The send window between hosts."""

import contextlib
import errno
import queue
import socket
import struct
import time
from types import SimpleNamespace

import psutil
import pytest

from dmltrain.base.env import Environment
from dmltrain.kvstore.transport import address, link, message, send_window, wire
from dmltrain.kvstore.transport.handshake import MEMORY, Caller
from dmltrain.kvstore.transport.link import Closed, Link
from dmltrain.kvstore.transport.listener import accept_loop
from dmltrain.kvstore.transport.message.job import Bye
from dmltrain.kvstore.transport.seal import Keys
from dmltrain.kvstore.transport.send_window import ANSWERS, PUSHES, UPDATE_BYTES, SendWindow
from dmltrain.kvstore.transport.wire import Flag, FrameError, FrameKind, Header
from tests.kvstore.answering import answer, data_listener, memory_listener, tcp
from tests.kvstore.whole_job import begun
from tests.waiting import SECONDS

TCP_RTO_MAX_MS = 44  # linux/tcp.h
CALLER = Caller.new("job", b"key", "worker", 3, "server 0")
PULL, DONE = Header(FrameKind.PULL), Header(FrameKind.DONE)
WAYS = {"tcp": tcp, "unix": socket.socketpair}
LISTENERS = {"tcp": data_listener, "unix": memory_listener}
CALLERS = {"tcp": CALLER, "unix": Caller.new("job", b"key", "worker", 3, "server 0", MEMORY)}


@pytest.fixture
def opened(closed_at_the_end):
    """opened(links) -> the same; they are closed at the end."""
    return lambda links: [closed_at_the_end(link) for link in links]


@pytest.fixture(params=WAYS)
def ends(request, opened):
    """Both ends of a connection after its handshake."""
    made = opened(map(Link, WAYS[request.param]()))
    for each in made:
        each.settle()
    return made


def data(size):
    return bytes(range(256)) * (size // 256) + bytes(size % 256)


def time_limits(end):
    """Of its calls, as the kernel has them: for receiving and for sending."""
    return [end.sock.getsockopt(socket.SOL_SOCKET, option, 16) for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO)]


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
    sending = begun(sender.send, *map(memoryview, pieces))
    for piece in pieces:
        target = bytearray(len(piece))
        receiver.read_into(memoryview(target))
        assert target == piece
    assert sender.bytes_sent == receiver.bytes_received == sum(sizes), "counted before the last byte left"
    sending.result(SECONDS)
    assert sum(counted) == sum(sizes)
    assert (receiver.bytes_sent, sender.bytes_received) == (0, 0)


def test_an_end_between_frames_differs_from_an_end_inside_a_frame(ends):
    sender, receiver = ends
    sender.send(Header(FrameKind.PULL, clock=7).pack(), bytes(3))
    sender.cut()
    assert receiver.read_header() == Header(FrameKind.PULL, clock=7)
    with pytest.raises(Closed, match="3 of 68 bytes"):
        receiver.read_header()
    with pytest.raises(Closed, match="^end of stream$"):
        receiver.read_header()
    with pytest.raises(Closed):
        for _ in range(100):
            receiver.send(bytes(1 << 16))


@pytest.mark.parametrize("end", ["cut", "close"])
def test_the_end_of_a_link_wakes_its_reader_and_may_be_repeated(ends, end):
    reader, _ = ends
    reading = begun(reader.read_header)
    getattr(reader, end)()
    with pytest.raises(Closed):
        reading.result(SECONDS)
    reader.close()
    reader.cut()
    assert reader.sock.fileno() == -1


def test_arrived_headers_are_read_together_up_to_one_with_a_payload(opened):
    sender, receiver = opened(map(Link, socket.socketpair()))
    receiver.settle()
    shared, followed = Header(FrameKind.PUSH, 9, flags=Flag.SHARED), Header(FrameKind.RELEASE, 5)
    sender.send(*(each.pack() for each in (PULL, shared, PULL, followed)), b"12345", PULL.pack(), DONE.pack())
    assert receiver.read_headers(2) == [PULL, shared]
    assert receiver.read_headers(9) == [PULL, followed]
    assert receiver.read_payload(followed) == b"12345"
    assert receiver.read_headers(9) == [PULL, DONE], "all that has arrived"
    assert receiver.bytes_received == 6 * wire.HEADER_SIZE + 5
    sender.close()
    with pytest.raises(Closed, match="end of stream"):
        receiver.read_headers(9)


def test_a_payload_longer_than_its_limit_or_in_shared_memory_is_not_read(ends):
    sender, receiver = ends
    sender.send(Header(FrameKind.PUSH, 1 << 40, flags=Flag.SHARED).pack(), PULL.pack(), b"12345")
    receiver.discard(receiver.read_header())
    receiver.read_into(memoryview(bytearray()))  # nor where a frame has no payload
    assert receiver.read_header() == PULL
    with pytest.raises(FrameError, match="6 bytes, the limit is 5"):
        receiver.read_payload(Header(FrameKind.CONTROL, 6), 5)
    assert receiver.read_payload(Header(FrameKind.CONTROL, 5), 5) == b"12345"


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("header", [Header(FrameKind.PUSH, size) for size in (0, 5, 1 << 20, (2 << 20) + 3)])
def test_a_payload_is_read_and_forgotten(opened, header, sealed):
    """In small pieces; the next frame, and the seals, are as if it had been used."""
    sender, receiver = opened(map(Link, tcp()))
    if sealed:
        keys = Keys(b"1" * 32, b"2" * 32, b"")
        sender.protect(keys, "auth", listens=True, certificate="")
        receiver.protect(keys, "auth", listens=False, certificate="")
    sending = begun(sender.send_all, [[header.pack(), bytes(header.length)], [PULL.pack()]])
    for expected in (header, PULL):
        assert receiver.read_header() == expected
        receiver.discard(expected)
    sending.result(SECONDS)
    assert receiver.bytes_received == sender.bytes_sent


def test_a_forgotten_payload_must_be_the_peers(opened):
    sender, receiver = opened(map(Link, tcp()))
    sender.protect(Keys(b"1" * 32, b"2" * 32, b""), "auth", listens=True, certificate="")
    receiver.protect(Keys(b"1" * 32, b"3" * 32, b""), "auth", listens=False, certificate="")
    header = Header(FrameKind.PUSH, 5)
    sender.send(header.pack(), b"12345")
    receiver.read_header()
    with pytest.raises(FrameError, match="its seal is wrong"):
        receiver.discard(header)


def test_a_full_socket_leaves_the_unsent_rest(opened):
    sender, receiver = opened(map(Link, socket.socketpair()))
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


def test_links_within_a_host_are_tuned_and_share_no_memory_until_arenas_are_exchanged(ends):
    """Nagle's algorithm would delay small frames. Buffers are as large as this system allows. Lost peers are detected
    without traffic, and an outage of the network is survived within a second."""
    assert all(end.own_arena is None and end.peer_arena is None for end in ends)
    sizes = [(socket.SOL_SOCKET, socket.SO_SNDBUF), (socket.SOL_SOCKET, socket.SO_RCVBUF)]
    with socket.socket() as large:
        for size in sizes:
            large.setsockopt(*size, 1 << 20)
        expected = [large.getsockopt(*size) for size in sizes]
    for sock in [end.sock for end in ends if end.sock.family == socket.AF_INET]:
        assert [sock.getsockopt(*size) for size in sizes] == expected
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        with contextlib.suppress(OSError):  # Linux has this from 6.15 on
            assert sock.getsockopt(socket.IPPROTO_TCP, TCP_RTO_MAX_MS) == 1000


def addresses():
    """This machine's, without loopback."""
    found = [each for each in psutil.net_if_addrs().values() for each in each if each.family == socket.AF_INET]
    return [each.address for each in found if not each.address.startswith("127.")]


SIX = [("::1", "::1")] if socket.has_dualstack_ipv6() else []


@pytest.mark.parametrize(
    "there, here", [("127.0.0.2", "127.0.0.1"), *SIX, *[(address, address) for address in addresses()[:1]]]
)
def test_peers_at_any_address_of_this_host_are_inside_it(opened, there, here):
    """They need no send window."""
    with link.listen(there) as listening:
        sock = socket.create_connection(listening.getsockname()[:2], source_address=(here, 0))
        for each in opened([Link(sock), Link(listening.accept()[0])]):
            each.settle()
            assert each.window is None


def test_a_link_has_ended_when_all_is_read_and_no_more_can_come(ends):
    mine, theirs = ends
    assert not mine.has_ended
    theirs.send(b"x")
    theirs.close()
    target = bytearray(1)
    assert not mine.has_ended
    mine.read_into(memoryview(target))
    assert mine.has_ended and target == b"x"
    mine.close()
    assert mine.has_ended


class Refusing:
    """A system that has only some algorithms for congestion control."""

    def __init__(self, *known):
        self.known, self.used = known, []

    def setsockopt(self, level, option, name):
        assert (level, option) == (socket.IPPROTO_TCP, socket.TCP_CONGESTION)
        if name not in self.known:
            raise OSError(errno.ENOENT, "No such file or directory")
        self.used.append(name)


@pytest.mark.parametrize(
    "known, host, used",
    [
        ((b"cubic", b"reno"), "127.0.0.1", [b"cubic"]),
        ((b"cubic", b"reno"), "::1", [b"cubic"]),
        ((b"reno",), "127.0.0.1", [b"reno"]),
        ((), "127.0.0.1", []),
        ((b"cubic", b"reno"), "10.0.0.1", []),
    ],
)
def test_on_loopback_nothing_is_paced(known, host, used):
    system = Refusing(*known)
    link.tune(system, host)
    assert system.used == used


def test_addresses_and_names_are_of_ipv4_or_ipv6(monkeypatch):
    def found(*families):
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(family, 1, 6, "", ()) for family in families])
        return address.family("host")

    four, six = socket.AF_INET, socket.AF_INET6
    assert (address.family("10.0.0.1"), address.family("fd00::1")) == (four, six)
    assert (found(six, four), found(six), found(four)) == (four, six, four)
    assert (address.shown("10.0.0.1", 2), address.shown("fd00::1", 2)) == ("10.0.0.1:2", "[fd00::1]:2")


def test_both_ends_of_loopback_are_tuned(opened):
    with link.listen("127.0.0.1") as listening:
        accepted = begun(lambda: answer(listening.accept()[0], data_listener()))
        (mine,) = opened([link.connect(listening.getsockname(), CALLER, SECONDS)])
        for sock in (listening, mine.sock):
            name = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")
            assert name in (b"cubic", b"reno")
        opened([accepted.result(SECONDS)])


def test_a_listener_that_accepts_nobody_is_given_up():
    """Its queue is full. The kernel itself gives it up after two minutes."""
    with socket.socket() as listening, contextlib.ExitStack() as waiting:
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        for each in [waiting.enter_context(socket.socket()) for _ in range(3)]:
            each.setblocking(False)
            each.connect_ex(listening.getsockname())
        since = time.monotonic()
        with pytest.raises(TimeoutError):
            link.connect(listening.getsockname(), CALLER, 0.2)
        assert time.monotonic() - since < SECONDS


def test_a_port_can_be_listened_on_again_at_once():
    """The kernel keeps the last connection for a minute on the side that closed first."""
    with link.listen("127.0.0.1") as listening:
        address = listening.getsockname()
    with link.listen(*address) as listening, socket.create_connection(address):
        listening.accept()[0].close()
    with link.listen(*address) as again:
        assert again.getsockname() == address
    with pytest.raises(ConnectionRefusedError):  # now it is closed
        link.connect(address, CALLER, SECONDS)


# -- the handshake ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_links_have_the_limit_of_the_handshake_until_they_are_settled_and_none_after(monkeypatch, opened, way):
    """For what follows the handshake, such as the exchange of shared memory."""
    monkeypatch.setattr(link, "HANDSHAKE_SECONDS", SECONDS + 0.25)
    calling, listening = WAYS[way]()
    answering = begun(answer, listening, LISTENERS[way]())
    mine, theirs = opened([link.greet(calling, CALLERS[way]), answering.result(SECONDS)])
    for limit in time_limits(mine):
        seconds, microseconds = struct.unpack("ll", limit)
        assert 0.0 < seconds + microseconds / 1e6 <= SECONDS + 0.26  # the kernel rounds to its clock
    mine.settle()
    theirs.settle(answers=True)
    assert time_limits(mine) == time_limits(theirs) == [bytes(16)] * 2
    theirs.send(PULL.pack())
    assert mine.read_header() == PULL
    mine.limit(4e-7)
    assert bytes(16) not in time_limits(mine), "what is almost over is not none"


@pytest.mark.parametrize("answer", [b"", Header(FrameKind.CHALLENGE, 9).pack()], ids=["none", "a byte now and then"])
def test_a_caller_gives_up_in_time(monkeypatch, answer):
    monkeypatch.setattr(link, "HANDSHAKE_SECONDS", 0.3)
    calling, listening = tcp()
    sent = []

    def drip():
        with contextlib.suppress(OSError):
            for byte in answer:
                listening.sendall(bytes([byte]))
                sent.append(byte)
                time.sleep(0.05)

    dripping = begun(drip)
    with pytest.raises(Closed, match="silent for 0.3 s during the handshake"):
        link.greet(calling, CALLER)
    assert calling.fileno() == -1, "closed"
    dripping.result(SECONDS)
    assert len(sent) < wire.HEADER_SIZE
    listening.close()


def test_a_caller_that_is_dropped_tries_again_until_it_is_heard(opened):
    """A listener that is busy with unauthenticated peers may drop it."""
    with link.listen("127.0.0.1") as listening:
        nonces = []

        def serve():
            for _ in range(2):
                dropped, _ = listening.accept()
                nonces.append(message.decode(FrameKind.HELLO, dropped.recv(4096)[wire.HEADER_SIZE :]).nonce)
                dropped.close()
            return answer(listening.accept()[0], data_listener())

        serving = begun(serve)
        mine, theirs = opened([link.connect(listening.getsockname(), CALLER, SECONDS), serving.result(SECONDS)])
        mine.send(message.encode(Bye()))
        assert theirs.read_header().kind == FrameKind.CONTROL
        assert len(set(nonces)) == 2, "a nonce is used once"


def test_a_caller_that_is_dropped_each_time_gives_up():
    with link.listen("127.0.0.1") as listening:
        count = []

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    listening.accept()[0].close()
                    count.append(1)

        begun(serve)
        since = time.monotonic()
        with pytest.raises((Closed, OSError)):
            link.connect(listening.getsockname(), CALLER, 0.4)
        assert time.monotonic() - since > 0.2 and len(count) > 2
        listening.shutdown(socket.SHUT_RDWR)


class Path:
    """A socket with these figures of its path from the kernel."""

    def __init__(self, shortest: int, rate: int) -> None:
        self.info: bytes | None = struct.pack("=148x I 8x Q", shortest, rate)
        self.set: list[int] = []
        self.segment = 1448

    def getsockopt(self, level: int, option: int, size: int = 0) -> bytes | int:
        if (level, option) == (socket.IPPROTO_TCP, socket.TCP_MAXSEG):
            return self.segment
        assert (level, option) == (socket.IPPROTO_TCP, socket.TCP_INFO)
        if self.info is None:
            raise OSError("not this protocol")
        return self.info[:size]

    def setsockopt(self, level: int, option: int, size: int) -> None:
        assert (level, option) == (socket.SOL_SOCKET, socket.SO_SNDBUF)
        self.set.append(size)


@pytest.mark.parametrize("least", [PUSHES, ANSWERS])
@pytest.mark.parametrize(
    "microseconds, rate, beyond",
    [
        (50, 12_500_000, 0),  # 100 Mbit/s: 1 KB, near enough to nothing
        (100, 1_250_000_000, 250_000),  # 10 Gbit/s
        (20_000, 125_000_000, 5_000_000),  # 1 Gbit/s over 20 ms
        (10**6, 10**12, 1 << 40),  # nonsense
    ],
)
def test_the_window_is_twice_the_capacity_of_the_path_and_a_little_more(microseconds, rate, beyond, least):
    path = Path(microseconds, rate)
    window = SendWindow(path, least)
    assert window.size == least
    window.sent((1 << 18) - 1)  # the path is looked at after each quarter of a mebibyte
    assert path.set == [least]
    window.sent(1)
    assert window.size == path.set[-1] == min(least + beyond, 1 << 30)


def test_four_segments_fit_into_any_window():
    """Those of IP over InfiniBand have 64 KiB."""
    path = Path(10, 10**6)
    path.segment = 65483
    assert SendWindow(path, PUSHES).size == 4 * 65483 and path.set == [4 * 65483]


@pytest.mark.parametrize("info", [None, 104], ids=["none", "fewer"])
def test_a_kernel_without_these_figures_changes_nothing(info):
    path = Path(100, 10**9)
    path.info = path.info[:info] if info else None
    window = SendWindow(path, PUSHES)
    window.sent(UPDATE_BYTES)
    assert window.size == PUSHES


def test_small_changes_of_the_path_leave_the_window_as_it_is():
    path = Path(1000, 10**9)  # 2 MB
    window = SendWindow(path, PUSHES)
    window.sent(UPDATE_BYTES)
    before = window.size
    for share, size in ((1.0, before), (1.2, before), (0.85, before), (1.35, 1.35), (0.9, 0.9)):
        path.info = Path(1000, int(share * 10**9)).info
        times = len(path.set)
        window.sent(UPDATE_BYTES - 1)
        assert len(path.set) == times
        window.sent(1)
        expected = size if size == before else PUSHES + int(2_000_000 * size)
        assert window.size == pytest.approx(expected, abs=1)
        assert len(path.set) == times + (size != before)


def test_pushes_have_priority(monkeypatch):
    """The connecting side pushes, the other answers."""
    monkeypatch.setattr(link, "_inside_host", lambda sock: False)
    monkeypatch.setattr(send_window, "SEGMENTS", 0)  # loopback's are large
    environment, accepted = Environment(role="server", job="j", key=b"k"), queue.Queue()
    with link.listen("127.0.0.1") as listening:
        begun(accept_loop, listening, environment, "server 0", lambda *served: accepted.put(served[0]))
        connecting = link.connect(listening.getsockname(), Caller.new("j", b"k", "worker", 0, "server 0"), SECONDS)
        accepting = accepted.get(timeout=SECONDS)
        assert (connecting.window.size, accepting.window.size) == (PUSHES, ANSWERS)
        connecting.close()
        accepting.close()


@contextlib.contextmanager
def read_away():
    """A connected socket whose other end reads everything."""
    sock, other = tcp()
    with sock, other:
        reading = begun(lambda: all(iter(lambda: other.recv(1 << 20), b"")))
        yield sock
        sock.shutdown(socket.SHUT_WR)
        reading.result(SECONDS)


def test_this_kernel_has_the_figures_at_the_expected_offsets():
    with read_away() as sock:
        sock.sendall(bytes(64 << 20))
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, send_window._INFO.size)
    shortest, rate = send_window._INFO.unpack(info)
    assert 1 <= shortest < 100_000  # us
    assert 1e6 < rate < 1e12  # bytes/s
