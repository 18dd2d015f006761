"""Files that are written whole or not at all, by the one function for them.

Each writer is killed with SIGKILL after each of its system calls, which is as before the next one; and another process
removes the leftovers of killed writers after each of them. The fake is what a test cannot have everywhere: a disk that
fails to sync, and a file system without locks.
"""

import errno
import fcntl
import itertools
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dmltrain.base import whole_file
from dmltrain.base.errors import JobLost
from tests.descriptors import descriptors
from tests.traced import traced

STOPS = 2  # of a system call
OLD, NEW, OTHER = b"old" * 1000, b"new" * 1000, b"other" * 1000


@pytest.fixture
def target(tmp_path: Path) -> Path:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "file").write_bytes(OLD)
    return folder / "file"


def names(target: Path) -> list[str]:
    return sorted(os.listdir(target.parent))


def test_a_file_is_replaced_and_nothing_else_is_left(target):
    for content in (NEW, bytearray(OTHER), memoryview(NEW), b""):
        whole_file.write(target, content)
        assert target.read_bytes() == content and names(target) == ["file"]
    whole_file.write(target, (piece for piece in (NEW, b"", OTHER)))
    assert target.read_bytes() == NEW + OTHER and names(target) == ["file"]


@pytest.mark.parametrize("mode, umask, found", [((), 0o027, 0o640), ((0o644,), 0, 0o644), ((0o644,), 0o077, 0o600)])
def test_mode_and_umask_count(target, mode, umask, found):
    before = os.umask(umask)
    try:
        whole_file.write(target, NEW, *mode)
    finally:
        os.umask(before)
    assert target.stat().st_mode & 0o777 == found


def test_kill_9_at_each_system_call_leaves_the_old_file_or_the_new_one(target):
    found, left = [], 0
    for calls in itertools.count(step=STOPS):
        target.write_bytes(OLD)
        with traced(lambda: whole_file.write(target, NEW)) as writer:
            over = not all(writer.step() for _ in range(calls))
        found.append(target.read_bytes())
        left += len(names(target)) - 1
        whole_file.remove_left(target.parent, "file")
        assert names(target) == ["file"], f"killed at stop {calls}"
        if over:
            break
    replaced = found.index(NEW)
    assert set(found[:replaced]) == {OLD} and set(found[replaced:]) == {NEW}
    assert replaced > 10 and left > 5, "the writer was stopped in its work"


@pytest.mark.thorough
def test_another_writer_at_each_system_call_disturbs_nothing(target):
    """It removes the leftovers of killed writers first, and this one is alive."""
    found = set()
    for calls in itertools.count(step=STOPS):
        target.write_bytes(OLD)
        with traced(lambda: whole_file.write(target, NEW)) as writer:
            over = not all(writer.step() for _ in range(calls))
            whole_file.write(target, OTHER)
            assert writer.run() == 0, f"stop {calls}"
        found.add(target.read_bytes())
        assert names(target) == ["file"], f"stop {calls}"
        if over:
            break
    assert found == {NEW, OTHER}, "the last rename counts"


def test_a_temporary_file_that_another_process_locks_first_is_given_up(target):
    with traced(lambda: whole_file.write(target, NEW)) as writer:
        while len(names(target)) == 1:
            writer.step()
        first = next(name for name in names(target) if name != "file")
        with open(target.parent / first, "rb+") as taken:
            fcntl.flock(taken, fcntl.LOCK_EX)
            assert writer.run() == 0
            assert target.read_bytes() == NEW and names(target) == sorted(["file", first])
    whole_file.remove_left(target.parent, "file")
    assert names(target) == ["file"]


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EACCES])
def test_a_refused_lock_is_tried_on_another_file(target, number):
    made = set()

    def lock(descriptor: int, operation: int) -> None:
        made.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        if len(made) < 3:
            raise OSError(number, os.strerror(number))

    whole_file.write(target, NEW, lock=lock)
    assert len(made) == 3 and target.read_bytes() == NEW and len(names(target)) == 3


def kill_while_writing(target: Path) -> str:
    """The name of the temporary file that is left."""
    with traced(lambda: whole_file.write(target, NEW)) as writer:
        while len(names(target)) == 1:
            writer.step()
        for _ in range(6):
            writer.step()
    return next(name for name in names(target) if name != target.name)


def test_leftovers_of_other_files_stay(target):
    left = kill_while_writing(target)
    whole_file.remove_left(target.parent, "fil|ile|file2")
    whole_file.remove_left(target.parent / "missing", "file")
    assert left in names(target)
    whole_file.write(target, OTHER)
    assert names(target) == ["file"], "the next writer of the file removes it"


def test_leftovers_of_other_hosts_stay_for_a_day(target):
    """A lock may not count on another host, whose writer may be alive."""
    left = kill_while_writing(target)
    elsewhere = target.parent / left.replace(whole_file.HOST, "0" * 8)
    os.rename(target.parent / left, elsewhere)
    for hours, kept in ((0, True), (23, True), (25, False)):
        changed = time.time() - hours * 3600
        os.utime(elsewhere, (changed, changed))
        whole_file.remove_left(target.parent, "file")
        assert elsewhere.exists() == kept, hours


def test_hosts_have_names_of_their_own():
    program = f"import platform; platform.node = lambda: 'h2'; import {whole_file.__name__} as p; print(p.HOST)"
    done = subprocess.run(["python3", "-c", program], capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert len(done.stdout.strip()) == 8 and (done.stdout.strip() != whole_file.HOST or platform.node() == "h2"), done


def no_locks(descriptor: int, operation: int) -> None:
    raise OSError(errno.ENOLCK, "No locks available")


def test_nothing_is_removed_where_nothing_can_be_locked(target):
    left = kill_while_writing(target)
    whole_file.write(target, OTHER, lock=no_locks)
    assert target.read_bytes() == OTHER and names(target) == sorted(["file", left])


def test_what_is_not_a_file_of_this_user_stays(target):
    """A link is not followed: what it points to may be locked, and removed by that name."""
    left = kill_while_writing(target)
    (target.parent / left).unlink()
    (target.parent / left).symlink_to(target)
    whole_file.remove_left(target.parent, "file")
    assert names(target) == sorted(["file", left]) and target.read_bytes() == OLD


def test_the_content_is_synced_before_its_name_and_the_name_before_the_end(target):
    """After a power cut only synced data is left: first the new content beside the old file, then the new name."""
    seen = []

    def sync(descriptor):
        os.fsync(descriptor)
        place = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        seen.append((place if place.is_dir() else place.read_bytes(), target.read_bytes()))

    whole_file.write(target, NEW, sync=sync)
    assert seen == [(NEW, OLD), (target.parent, NEW)]


def failing(at: int, number: int) -> Callable[[int], None]:
    calls = itertools.count(1)

    def sync(descriptor: int) -> None:
        if next(calls) == at:
            raise OSError(number, os.strerror(number))

    return sync


@pytest.mark.parametrize("at, number, kept", [(1, errno.EIO, OLD), (1, errno.EINVAL, OLD), (2, errno.EIO, NEW)])
def test_a_failed_sync_is_an_error_but_a_folder_that_cannot_be_synced_is_none(target, at, number, kept):
    with pytest.raises(OSError, match=os.strerror(number)):
        whole_file.write(target, NEW, sync=failing(at, number))
    assert target.read_bytes() == kept and names(target) == ["file"]
    for never in (errno.EINVAL, errno.ENOTSUP):  # as on some network file systems
        whole_file.write(target, OTHER, sync=failing(2, never))
        assert target.read_bytes() == OTHER


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """64 KiB, and 32 of them in use."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting is not allowed here: needs root; a limit of file sizes is tried in its place")
    try:
        (folder / "file").write_bytes(bytes(1 << 15))
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_keeps_the_old_file(small_disk):
    target = small_disk / "file"
    with pytest.raises(OSError) as caught:
        whole_file.write(target, bytes(1 << 16))
    assert caught.value.errno == errno.ENOSPC
    assert target.read_bytes() == bytes(1 << 15) and names(target) == ["file"]
    whole_file.write(target, NEW)
    assert target.read_bytes() == NEW, "the space of the temporary file is free again"


def test_no_descriptor_stays_open(target):
    """An open one would also keep its lock."""
    left = kill_while_writing(target)
    before = descriptors()
    with open(target.parent / left, "rb") as taken:
        fcntl.flock(taken, fcntl.LOCK_SH)
        whole_file.write(target, OTHER)
    whole_file.write(target, NEW)
    for at in (1, 2):
        with pytest.raises(OSError):
            whole_file.write(target, OTHER, sync=failing(at, errno.EIO))
    assert descriptors() <= before


def test_what_is_not_confirmed_replaces_nothing(tmp_path):
    def confirm():
        raise JobLost("the others go on without this process")

    target = tmp_path / "m-0001.npz"
    target.write_bytes(b"of the next leader")
    with pytest.raises(JobLost):
        whole_file.write(target, b"of this one", confirm=confirm)
    assert target.read_bytes() == b"of the next leader" and [*tmp_path.iterdir()] == [target]
