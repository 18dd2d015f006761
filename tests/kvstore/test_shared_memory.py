"""Arenas: what they give, who may change them, and how two processes of a host set up shared memory, or do not."""

import concurrent.futures
import contextlib
import errno
import fcntl
import os
import queue
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dmltrain.base.env import Environment
from dmltrain.kvstore.server.declared import Rejected
from dmltrain.kvstore.server.memory import Buffer
from dmltrain.kvstore.server.reply import MAX_VALUES, Reply, Unread
from dmltrain.kvstore.transport import link, rendezvous
from dmltrain.kvstore.transport.handshake import MEMORY, Caller
from dmltrain.kvstore.transport.link import Closed
from dmltrain.kvstore.transport.listener import accept_loop
from dmltrain.kvstore.transport.shared_memory import Arena, ArenaError, Mapping
from dmltrain.kvstore.transport.wire import FrameKind, Header
from tests.kvstore.answering import answer, memory_listener
from tests.kvstore.whole_job import begun
from tests.waiting import SECONDS

ADD_SEALS, SEAL, SHRINK, GROW = 1033, 1, 2, 4  # linux/fcntl.h
SIZE = 4096


def test_an_arena_has_as_many_addresses_as_the_machine_has_memory_and_keeps_its_size():
    arena = Arena()
    assert arena.capacity == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert os.fstat(arena.descriptor).st_size == arena.capacity
    assert "memfd:dmltrain" in os.readlink(f"/proc/self/fd/{arena.descriptor}"), "its name in lists of open files"
    assert not os.get_inheritable(arena.descriptor), "no other program inherits it"
    arena = Arena(SIZE)
    for size in (0, SIZE - 1, SIZE + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.descriptor, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(arena.descriptor, ADD_SEALS, SHRINK)


def test_memory_is_given_in_order_and_only_what_was_taken_has_an_offset():
    arena = Arena(SIZE)
    taken = [arena.take(size) for size in (1, 65, 64, 0, SIZE - 256)]
    assert [offset for offset, _ in taken] == [0, 64, 192, 256, 256]
    assert [memory.size for _, memory in taken] == [1, 65, 64, 0, SIZE - 256]
    assert {memory.dtype for _, memory in taken} == {np.dtype(np.uint8)}
    assert arena.take(1) is None
    assert Arena(SIZE).take(SIZE + 1) is None
    arena = Arena(SIZE)
    (_, first), (_, second) = arena.take(64), arena.take(64)
    assert arena.offset_of(first) == 0 and arena.offset_of(second) == 64
    assert arena.offset_of(second[60:].view(np.float32)) == 124
    beyond = np.lib.stride_tricks.as_strided(second, (65,))
    assert arena.offset_of(beyond) is None and arena.offset_of(np.zeros(5)) is None
    before = np.lib.stride_tricks.as_strided(first[1:], (3,), (-1,))[1:]
    assert arena.offset_of(before) is None or before.ctypes.data >= first.ctypes.data


WRITERS = """
import ctypes, mmap, os, sys
descriptor = int(sys.argv[1])

def map_for_writing():
    mmap.mmap(descriptor, 4096)

def open_again_and_map():
    again = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)
    mmap.mmap(again, 4096)

def write():
    os.pwrite(descriptor, b"x", 0)

def punch_a_hole():
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.fallocate(descriptor, 3, ctypes.c_long(0), ctypes.c_long(4096)):
        raise OSError(ctypes.get_errno(), "fallocate")

def make_a_mapping_writable():
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    address = ctypes.c_void_p(libc.mmap(None, 4096, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, ctypes.c_long(0)))
    if libc.mprotect(address, 4096, mmap.PROT_READ | mmap.PROT_WRITE):
        raise OSError(ctypes.get_errno(), "mprotect")

for way in (map_for_writing, open_again_and_map, write, punch_a_hole, make_a_mapping_writable):
    try:
        way()
        print(way.__name__, "succeeded")
    except PermissionError:
        print(way.__name__, "refused")
print(mmap.mmap(descriptor, 4096, prot=mmap.PROT_READ)[:4])
"""


def test_a_process_that_got_the_descriptor_cannot_write_and_the_owner_can():
    arena = Arena(SIZE)
    _, memory = arena.take(4)
    memory[:] = list(b"mine")
    program = [sys.executable, "-c", WRITERS, str(arena.descriptor)]
    ended = subprocess.run(program, pass_fds=[arena.descriptor], capture_output=True, text=True, check=True)
    *ways, read = ended.stdout.splitlines()
    names = ["map_for_writing", "open_again_and_map", "write", "punch_a_hole", "make_a_mapping_writable"]
    assert ways == [f"{way} refused" for way in names] and read == "b'mine'"
    _, later = arena.take(4)
    later[:] = memory[:] = list(b"next")
    mapping = Mapping(os.dup(arena.descriptor))
    assert mapping.view(0, 4).tobytes() == b"next"
    torch = pytest.importorskip("torch")
    offset, memory = arena.take(32)
    tensor = torch.from_numpy(memory.view(np.float32))
    tensor.copy_(torch.arange(8.0)).mul_(2)
    assert mapping.view(offset, 32).view(np.float32).tolist() == [0, 2, 4, 6, 8, 10, 12, 14], "also through a tensor"


def test_before_linux_5_1_the_size_is_sealed_and_the_missing_seal_is_logged_once(capsys):
    def old(descriptor, command, seals):
        if seals & ~0xF:
            raise OSError(errno.EINVAL, "Invalid argument")
        return fcntl.fcntl(descriptor, command, seals)

    arena = Arena(SIZE, add_seals=old)
    with pytest.raises(PermissionError):
        os.ftruncate(arena.descriptor, 0)
    assert capsys.readouterr().err.count("shared memory is not sealed against writing (Linux before 5.1)") == 1
    _, memory = arena.take(4)
    memory[:] = 5
    assert Mapping(os.dup(arena.descriptor)).view(0, 4).tolist() == [5] * 4, "it is used all the same"
    Arena(SIZE)
    assert capsys.readouterr().err == ""


def test_memory_that_cannot_be_sealed_for_another_reason_is_not_shared():
    def refused(descriptor, command, seals):
        raise OSError(errno.EBUSY, "Device or resource busy")

    with pytest.raises(ArenaError, match="no memory to share: .*busy"):
        Arena(SIZE, add_seals=refused)


def memfd(seals, size=SIZE):
    descriptor = os.memfd_create("a test's", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, ADD_SEALS, seals)
    return descriptor


def is_open(descriptor):
    return os.path.exists(f"/proc/self/fd/{descriptor}")


@pytest.mark.parametrize("seals", [0, SEAL, SHRINK | GROW, SEAL | GROW, SEAL | SHRINK])
def test_memory_whose_size_could_change_is_refused(seals):
    refuses(memfd(seals), "could shrink")


def test_what_is_no_memory_is_refused():
    reading, writing = os.pipe()
    for descriptor in (reading, memfd(SEAL | SHRINK | GROW, 0), 1 << 20):
        refuses(descriptor, "cannot be read: ")
    os.close(writing)


def refuses(descriptor, said):
    with pytest.raises(ArenaError, match=f"the memory that the peer shares {said}"):
        Mapping(descriptor)
    assert not is_open(descriptor)


def test_memory_is_read_as_bytes_up_to_its_end():
    arena = Arena(SIZE)
    _, memory = arena.take(SIZE)
    memory[:] = np.arange(SIZE) % 251
    descriptor = os.dup(arena.descriptor)
    mapping = Mapping(descriptor)
    assert not is_open(descriptor)
    for offset, size in ((0, SIZE), (SIZE - 1, 1), (0, 0), (SIZE, 0), (7, 100)):
        view = mapping.view(offset, size)
        assert view.dtype == np.uint8 and not view.flags.writeable
        assert view.tolist() == memory[offset : offset + size].tolist()
    for offset, size in ((SIZE - 4, 5), (-1, 2), (0, SIZE + 1), (1 << 63, 1), (0, -1)):
        with pytest.raises(ValueError, match="outside the shared memory"):
            mapping.view(offset, size)


def reply(offset, worker=0, key=0, index=0):
    return Reply(worker, key, index, 1, 0.0, Buffer(np.zeros(4, np.float32), "value", offset), 0, 0.0, 0.0, 0, None)


def test_a_value_outside_the_shared_memory_is_sent_and_each_worker_and_slice_has_its_own_limit():
    unread = Unread()
    assert not unread.lend(reply(None))
    for offset in range(MAX_VALUES):
        assert unread.lend(reply(64 * offset))
    assert not unread.lend(reply(64 * MAX_VALUES))
    assert unread.lend(reply(0)), "a value that the worker keeps anyway"
    for other in (reply(64, worker=1), reply(64, key=1), reply(64, index=1)):
        assert unread.lend(other)


def test_a_released_value_makes_room_and_only_what_was_lent_is_released():
    unread = Unread()
    kept = [reply(0) for _ in range(1024)]
    assert all(unread.lend(each) for each in kept)
    assert not unread.lend(reply(0))
    assert unread.released(0, 0, 0, 0) is kept[-1]
    assert unread.lend(reply(0))
    unread = Unread()
    unread.lend(reply(64))
    unread.released(0, 0, 0, 64)
    for worker, offset in ((0, 64), (1, 64), (0, 0)):
        with pytest.raises(Rejected, match="a release of key 0 slice 0 at an offset that was not sent"):
            unread.released(worker, 0, 0, offset)


def test_what_a_worker_that_has_left_kept():
    unread = Unread()
    kept = [reply(0), reply(64), reply(0, key=1)]
    other = reply(0, worker=1)
    for each in (*kept, other):
        unread.lend(each)
    assert list(unread.left(0)) == kept and list(unread.left(0)) == []
    assert list(unread.left(1)) == [other]


ARENA_SIZE = 1 << 20
NOBODY = 65534


@pytest.fixture
def server():
    """A listener by name, with the result of its first caller: a Link or the exception."""
    sock, name = rendezvous.listen()

    def serve():
        caller, _ = sock.accept()
        try:
            connection = answer(caller, memory_listener())
            connection.limit(link.HANDSHAKE_SECONDS)
            rendezvous.exchange(connection, Arena(ARENA_SIZE))
            return connection
        except (Closed, ArenaError) as error:
            caller.close()
            return error

    serving = begun(serve)
    yield name, lambda: serving.result(SECONDS)
    sock.close()


def caller():
    return Caller.new("job", b"key", "worker", 0, "server 0", MEMORY)


def called(name):
    """The link of a caller that has not shared its memory yet."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(f"\0{name}")
    return link.greet(sock, caller())


def test_both_sides_read_what_the_other_writes_and_wait_as_long_as_they_must(server):
    name, outcome = server
    mine = rendezvous.connect(name, caller(), Arena(ARENA_SIZE))
    theirs = outcome()
    for writer, reader in ((mine, theirs), (theirs, mine)):
        offset, memory = writer.own_arena.take(5)
        memory[:] = range(5)
        seen = reader.peer_arena.view(offset, 5)
        assert seen.tolist() == [0, 1, 2, 3, 4]
        memory[0] = 9
        assert seen[0] == 9 and not seen.flags.writeable
        assert writer.own_arena.offset_of(memory) == offset and writer.own_arena.offset_of(np.zeros(5)) is None
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        assert mine.sock.getsockopt(socket.SOL_SOCKET, option, 16) == bytes(16)
    theirs.send(Header(FrameKind.PULL).pack(), Header(FrameKind.DONE).pack())
    assert mine.read_headers(9) == [Header(FrameKind.PULL), Header(FrameKind.DONE)], "read together"
    mine.close()
    theirs.close()


def test_a_missing_listener_is_no_error_and_a_caller_that_is_dropped_tries_again():
    assert rendezvous.connect("dmltrain-nobody", caller(), Arena(ARENA_SIZE)) is None
    # A listener drops callers at random if there are many, or it is busy.
    sock, name = rendezvous.listen()

    def serve():
        for _ in range(2):
            sock.accept()[0].close()
        rendezvous.exchange(answer(sock.accept()[0], memory_listener()), Arena(ARENA_SIZE))

    serving = begun(serve)
    rendezvous.connect(name, caller(), Arena(ARENA_SIZE)).close()
    serving.result(SECONDS)
    sock.close()


def test_a_caller_that_cannot_map_the_memory_is_forgotten(server):
    """It then connects over TCP: the listener must not take it for a worker that has left."""
    name, outcome = server
    connection = called(name)
    rendezvous.give(connection, Arena(ARENA_SIZE))
    rendezvous.receive(connection)
    connection.close()
    assert isinstance(outcome(), Closed)


def test_a_server_without_shared_memory_is_left_at_once():
    sock, name = rendezvous.listen()

    def serve():
        connection = answer(sock.accept()[0], memory_listener())
        rendezvous.receive(connection)
        connection.send(b"A")  # and no descriptor
        with pytest.raises(Closed, match="end of stream"):
            connection.read_header()

    serving = begun(serve)
    with pytest.raises(ArenaError, match="the peer shares no memory") as raised:
        rendezvous.connect(name, caller(), Arena(ARENA_SIZE))
    serving.result(SECONDS)
    assert raised, "while the error is still held, and with it all that it knows"
    sock.close()


@pytest.fixture
def full():
    """A listener by name whose queue unauthenticated peers have filled, and their sockets."""
    listening, name = rendezvous.listen()
    listening.listen(0)
    unauthenticated = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(3)]
    for each in unauthenticated:
        each.setblocking(False)
        each.connect_ex(f"\0{name}")
    yield listening, name
    for each in (listening, *unauthenticated):
        each.close()


def test_a_listener_whose_queue_is_full_is_waited_for(full):
    """Any user can fill it, so that is no reason to do without shared memory."""
    listening, name = full

    calling = begun(rendezvous.connect, name, caller(), Arena(ARENA_SIZE))
    with pytest.raises(concurrent.futures.TimeoutError):
        calling.result(0.2)
    served = queue.Queue()
    environment = Environment(role="server", job="job", key=b"key")

    def admit(connection):
        rendezvous.exchange(connection, Arena(ARENA_SIZE))

    begun(accept_loop, listening, environment, "server 0", lambda *each: served.put(each), admit)
    assert served.get(timeout=SECONDS)[1:] == ("worker", 0)
    found = calling.result(SECONDS)
    assert found.peer_arena
    found.close()


def test_a_listener_whose_queue_stays_full_is_not_waited_for_forever(full, monkeypatch):
    """TCP is used instead."""
    monkeypatch.setattr(rendezvous, "CONNECT_SECONDS", 0.2)
    assert begun(rendezvous.connect, full[1], caller(), Arena(ARENA_SIZE)).result(SECONDS) is None


def test_a_caller_that_shares_nothing_is_not_waited_for_forever(server, monkeypatch):
    monkeypatch.setattr(link, "HANDSHAKE_SECONDS", 0.2)
    name, outcome = server
    connection = called(name)
    assert isinstance(outcome(), Closed)
    connection.close()


@pytest.mark.parametrize("count", [1, 2])
def test_one_memory_that_cannot_shrink_is_expected_and_no_other_is_kept(server, count):
    name, outcome = server
    connection = called(name)
    descriptors = [os.memfd_create("dmltrain-not-wanted") for _ in range(count)]
    socket.send_fds(connection.sock, [b"A"], descriptors)
    for each in descriptors:
        os.close(each)
    assert isinstance(outcome(), ArenaError) and "could shrink" in str(outcome())
    names = []
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile by another thread
            names.append(os.readlink(each))
    assert not any("not-wanted" in name for name in names)
    connection.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_only_processes_of_one_user_share_memory():
    def all_same(ends):
        return {rendezvous.same_user(end) for end in ends}

    of_root = socket.socketpair()
    os.seteuid(NOBODY)
    try:
        of_nobody = socket.socketpair()
        found = [all_same(of_root), all_same(of_nobody)]
    finally:
        os.seteuid(0)
    assert [*found, all_same(of_root), all_same(of_nobody)] == [{False}, {True}, {True}, {False}]
    for each in (*of_root, *of_nobody):
        each.close()
