"""A service, and workers by hand: what the tests of single frames send and read."""

import contextlib
import queue
import socket
import struct
from dataclasses import replace

import numpy as np
import pytest

from dmltrain.base.env import Environment
from dmltrain.kvstore.server.core import ServerCore
from dmltrain.kvstore.server.links.service import Service, allocator
from dmltrain.kvstore.server.process import ServerProcess
from dmltrain.kvstore.transport import handshake, link, message, rendezvous, wire
from dmltrain.kvstore.transport.data_links import DataLinks, Watch
from dmltrain.kvstore.transport.handshake import Caller
from dmltrain.kvstore.transport.link import Closed
from dmltrain.kvstore.transport.listener import accept_loop
from dmltrain.kvstore.transport.message.data import Leave
from dmltrain.kvstore.transport.message.job import Heartbeat, Register, Shutdown
from dmltrain.kvstore.transport.shared_memory import Arena
from dmltrain.kvstore.transport.wire import Flag, FrameKind, Header
from dmltrain.kvstore.view import View
from tests.kvstore.made import declaration, start
from tests.kvstore.whole_job import NEVER, begun
from tests.waiting import SECONDS

ENVIRONMENT = Environment(role="server", num_workers=2, num_servers=1, job="job", key=b"key")
ELASTIC = replace(ENVIRONMENT, num_workers=3, elastic=1)
FIRST = View(1, 0, ((0,), (1,), (2,)), (0,))
DEADLINE = SECONDS
MEMORY = 1 << 26  # bytes of an arena


class Peer:
    """Worker `rank`, by hand: each call sends one frame, or reads one. `address`: a port, or the name of a socket
    through which memory is shared."""

    def __init__(self, address, rank):
        purpose = handshake.MEMORY if isinstance(address, str) else handshake.DATA
        caller = Caller.new("job", b"key", "worker", rank, "server 0", purpose)
        self.arena = Arena(MEMORY)
        if isinstance(address, str):
            self.link = rendezvous.connect(address, caller, self.arena)
        else:
            self.link = link.connect(address, caller, DEADLINE)
        self.link.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(DEADLINE), 0))

    def send(self, kind, payload=b"", **fields):
        self.link.send(Header(kind, len(payload), **fields).pack(), payload)

    def push(self, values, key=0, clock=1, rate=-1.0, **fields):
        values = np.asarray(values, np.float32)
        self.send(FrameKind.PUSH, values.tobytes(), key=key, clock=clock, number=rate, **fields)

    def push_shared(self, values, clock, flags=0, **fields):
        offset, memory = self.arena.take(4 * len(values))
        memory.view(np.float32)[:] = values
        fields |= {"flags": flags | Flag.SHARED, "offset": offset}
        self.link.send(Header(FrameKind.PUSH, 4 * len(values), clock=clock, **fields).pack())

    def answer(self):
        """The next header and its payload."""
        header = self.link.read_header()
        payload = bytearray(header.length if header.is_followed else 0)
        self.link.read_into(memoryview(payload))
        return header, bytes(payload)

    def begun(self, key):
        """Pull a value and read its header: the rest is being sent. Returns the memory for that."""
        self.send(FrameKind.PULL, key=key)
        return memoryview(bytearray(self.link.read_header().length))

    def value(self):
        """The next header, which is a value's, and the value."""
        header, payload = self.answer()
        assert header.kind == FrameKind.VALUE, message.decode(header.kind, payload)
        if header.flags & Flag.SHARED:
            payload = self.link.peer_arena.view(header.offset, header.length)
        return header, np.frombuffer(payload, np.float32).tolist()

    def error(self):
        """What the service says last."""
        header, payload = self.answer()
        with pytest.raises(Closed):
            self.link.read_header()
        return message.decode(header.kind, payload).reason


class Server:
    """A service of these keys' sizes; its `peers` connect when they are asked for."""

    def __init__(self, kind="dist_sync", staleness=0.0, sizes=(4, 4), shared=False, make_step=None, **options):
        self.arena, self.failed = Arena(MEMORY) if shared else None, queue.Queue()
        environment = options.pop("environment", ENVIRONMENT)
        workers = environment.num_workers
        self.core = ServerCore(environment.ranks, make_step=make_step, allocate=allocator(self.arena))
        self.core.workers.on_hosts([(worker,) for worker in range(workers)])
        for worker in range(workers):
            self.core.keys.declare(worker, declaration(kind, staleness, sizes))
        if make_step:
            self.core.keys.optimize({"name": "made"})
        self.service = Service("server 0", environment, self.core, self.arena, self.failed.put, **options)
        self.listening, self.met, self._peers = link.listen("127.0.0.1"), rendezvous.listen(), {}
        self._others = []
        self.lost = queue.Queue()
        links = DataLinks("server", environment, {}, Watch(8.0), self.lost.put)
        self.service.accept(self.met[0] if shared else self.listening, links)

    def peer(self, rank=0):
        if rank not in self._peers:
            self._peers[rank] = self.another(rank)
        return self._peers[rank]

    def peers(self, count=2):
        return [self.peer(rank) for rank in range(count)]

    def another(self, rank):
        """Another process with this rank."""
        peer = Peer(self.met[1] if self.arena else self.listening.getsockname(), rank)
        self._others.append(peer)
        return peer

    def close(self):
        for other in self._others:
            other.link.close()
        self.service.shared.end()
        self.listening.close()
        self.met[0].close()


class Scheduler:
    """Plays the scheduler of a process of an elastic job. `heard` has what that reports, then "end of stream"."""

    def __init__(self):
        self._listening, self.heard, self._links = socket.create_server(("127.0.0.1", 0)), queue.Queue(), queue.Queue()
        self.port, own = self._listening.getsockname()[1], replace(ELASTIC, role="scheduler")
        begun(accept_loop, self._listening, own, "scheduler", self._serve)

    def _serve(self, connection, role, index):
        with contextlib.suppress(Closed):
            while True:
                found = connection.read_message(connection.read_header())
                if isinstance(found, Register):
                    self._links.put((connection, found))
                elif isinstance(found, Heartbeat):
                    connection.send(message.encode(found))
                else:
                    self.heard.put(found)
        self.heard.put("end of stream")

    def registered(self):
        """What the process has registered as. From then on `send` reaches it."""
        self.link, found = self._links.get(timeout=DEADLINE)
        return found

    def send(self, found):
        self.link.send(message.encode(found))

    def rest(self):
        """What has been reported that was not read, until the process has gone."""
        self._listening.close()
        return list(iter(lambda: self.heard.get(timeout=DEADLINE), "end of stream"))


class Process(Scheduler):
    """A server's process."""

    def __init__(self, transport="tcp"):
        super().__init__()
        self.ended = begun(ServerProcess(replace(ELASTIC, root_port=self.port, transport=transport), None, NEVER).run)
        its = self.registered()
        self.address, self.socket_name = (its.host, its.port), its.socket_name
        self.send(start([("h", "")] * ELASTIC.num_workers, [(*self.address, self.socket_name, "h")]))

    def close(self):
        self.send(Shutdown())
        assert self.ended.result(DEADLINE) == ""
        return self.rest()


def heard(peer):
    """Wait until the service has taken all frames of this worker. Returns the answers that came before."""
    peer.send(FrameKind.PROBE, view=99)
    found = []
    while True:
        header, payload = peer.answer()
        if header.kind == FrameKind.PROBE:
            return found
        found.append((header, payload))


def push(peer, values, view, shared=False, **fields):
    """Push and pull."""
    fields = {"flags": Flag.PULL, "view": view, "clock": 1, **fields}
    if shared:
        peer.push_shared(values, **fields)
    else:
        peer.push(values, **fields)


def expect_sum(peers, view, total, shared=False, clock=1):
    """All these get the value, and have read it."""
    for peer in peers:
        header, value = peer.value()
        assert (header.view, header.clock, value) == (view, clock, [total] * len(value))
        if shared:
            peer.send(FrameKind.RELEASE, wire.release([(header.key, 0, header.offset)]), view=view)


def answered(peer, content, view=0):
    """Send this message, and wait for its answer."""
    peer.link.send(message.encode(content, view=view))
    assert peer.answer()[0].kind == FrameKind.DONE


def leave(peer, done=-1, view=0):
    """In good order, and close the link."""
    answered(peer, Leave(done), view)
    peer.link.close()
