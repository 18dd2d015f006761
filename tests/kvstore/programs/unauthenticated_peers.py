"""Opens connections without a key at a steady rate, to all that begins to listen on this machine, or to one port.

Arguments: connections per second; "new" (ports of 127.0.0.1 and dmltrain's unix sockets that did not listen when this
program started) or "elsewhere" (a port that belongs to no job and is never accepted from); a command to run
meanwhile. The connections take turns: one is silent, one sends half a hello and falls silent, one sends noise, one
sends a byte now and then. Each stays until it is closed, or for STAY seconds. When the command has ended, prints how
many connections it opened as JSON, and ends like it.
"""

import contextlib
import itertools
import json
import resource
import selectors
import socket
import subprocess
import sys
import time
from collections import deque

STAY = 5.0  # s
LOOK = 0.05  # s between two looks for new listeners
HELLO = b"DMLT\x06\x01" + bytes(30)
FIRST_WORDS = (b"", HELLO, b"GET / HTTP/1.1\r\nHost: example\r\n\r\n" * 3, b"D")


def listeners() -> set:
    """Addresses that listen: (host, port) on loopback, and names of dmltrain's abstract sockets."""
    found = set()
    with open("/proc/net/tcp") as lines:
        for line in itertools.islice(lines, 1, None):
            local, state = line.split()[1], line.split()[3]
            if state == "0A" and local.startswith("0100007F"):
                found.add(("127.0.0.1", int(local.rpartition(":")[2], 16)))
    with open("/proc/net/unix") as lines:
        named = (line.split() for line in lines if "@dmltrain-" in line)
        found |= {"\0" + words[7][1:] for words in named if words[3] == "00010000"}
    return found


class Peers:
    def __init__(self, target: str) -> None:
        self._selector = selectors.DefaultSelector()
        self._leaving: deque = deque()  # (when, socket), in order
        self._before = listeners()
        self._elsewhere = socket.create_server(("127.0.0.1", 0), backlog=256) if target == "elsewhere" else None
        self._targets: list = [self._elsewhere.getsockname()] if self._elsewhere else []
        self._looked = 0.0
        self._numbers = itertools.count()
        self.opened, self.dripping = 0, deque()

    def look(self, now: float) -> None:
        if now - self._looked > LOOK:
            self._looked, found = now, sorted(listeners() - self._before, key=str)
            if self._elsewhere is None:  # else it has looked in vain, so that it costs the same
                self._targets = found

    def open(self, now: float) -> None:
        number = next(self._numbers)
        if not self._targets:
            return
        address = self._targets[number // len(FIRST_WORDS) % len(self._targets)]
        sock = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
        sock.setblocking(False)
        if sock.connect_ex(address) not in (0, 115):
            return sock.close()
        self.opened += 1
        self._selector.register(sock, selectors.EVENT_WRITE, number % len(FIRST_WORDS))
        self._leaving.append((now + STAY, sock))

    def react(self, seconds: float) -> None:
        for key, _ in self._selector.select(seconds):
            sock = key.fileobj
            try:
                if key.data is not None:  # connected
                    if FIRST_WORDS[key.data]:
                        sock.send(FIRST_WORDS[key.data])
                    self._selector.modify(sock, selectors.EVENT_READ, None)
                    if key.data == 3:
                        self.dripping.append(sock)
                elif not sock.recv(4096):
                    self.close(sock)
            except OSError:
                self.close(sock)

    def close(self, sock: socket.socket) -> None:
        if sock.fileno() >= 0:
            self._selector.unregister(sock)
            sock.close()

    def leave(self, now: float) -> None:
        while self._leaving and self._leaving[0][0] < now:
            self.close(self._leaving.popleft()[1])

    def drip(self) -> None:
        for _ in range(min(20, len(self.dripping))):
            sock = self.dripping.popleft()
            with contextlib.suppress(OSError):
                sock.send(b"M")
                self.dripping.append(sock)


def main() -> None:
    rate, target, command = float(sys.argv[1]), sys.argv[2], sys.argv[3:]
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    peers = Peers(target)
    among = subprocess.Popen(command)
    began, due = time.monotonic(), 0
    while among.poll() is None:
        now = time.monotonic()
        peers.look(now)
        while due < (now - began) * rate:
            due += 1
            peers.open(now)
        peers.react(0.01)
        peers.leave(now)
        peers.drip()
    print(json.dumps({"opened": peers.opened, "seconds": time.monotonic() - began}), flush=True)
    sys.exit(among.returncode)


main()
