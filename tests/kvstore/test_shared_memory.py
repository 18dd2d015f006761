"""Arenas: what they give, who may change them, and which memory of a peer is refused; what a worker may read in it."""

import errno
import fcntl
import os
import subprocess
import sys

import numpy as np
import pytest

from dmltrain.kvstore.server.core import Reply
from dmltrain.kvstore.server.declared import Rejected
from dmltrain.kvstore.server.slice import Buffer
from dmltrain.kvstore.server.unread import MAX_VALUES, Unread
from dmltrain.kvstore.transport.shared_memory import Arena, ArenaError, Mapping

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
