"""The send window of a link between hosts: about the capacity of its path."""

import contextlib
import queue
import socket
import struct
import time

import pytest

from dmltrain.env import Environment
from dmltrain.kvstore.transport import link, send_window
from dmltrain.kvstore.transport.handshake import Caller
from dmltrain.kvstore.transport.listener import accept_loop
from dmltrain.kvstore.transport.send_window import ANSWERS, PUSHES, UPDATE_BYTES, SendWindow
from tests.kvstore.answering import tcp
from tests.kvstore.whole_job import begun
from tests.waiting import SECONDS


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


def test_the_constant_parts_are_half_and_a_quarter_of_a_millisecond_at_1_gigabit_per_second():
    assert pytest.approx(0.5e-3, rel=0.1) == PUSHES / 125e6 and pytest.approx(0.25e-3, rel=0.1) == ANSWERS / 125e6


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


def test_large_segments_do_not_stall():
    """Those of loopback have 64 KiB. A smaller window transfers only 2 MB/s."""
    with read_away() as sock:
        before = seconds_of_sending(sock)
        SendWindow(sock, ANSWERS)
        assert seconds_of_sending(sock) < 3 + 20 * before


def seconds_of_sending(sock):
    since = time.monotonic()
    sock.sendall(bytes(16 << 20))
    return time.monotonic() - since


def test_this_kernel_has_the_figures_at_the_expected_offsets():
    with read_away() as sock:
        sock.sendall(bytes(64 << 20))
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, send_window._INFO.size)
    shortest, rate = send_window._INFO.unpack(info)
    assert 1 <= shortest < 100_000  # us
    assert 1e6 < rate < 1e12  # bytes/s
