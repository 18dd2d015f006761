"""The launcher's side of copying a folder to one agent; the protocol is in `dmltrain_launch.agent.protocol`.

Every write ends with a complete message and its bytes, so that other threads may write messages in between.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator

from dmltrain_launch.agent.commands import AnnouncedEntry, Entries, File, Remove
from dmltrain_launch.agent.copy.destination import checked
from dmltrain_launch.agent.protocol import batches, encode_command
from dmltrain_launch.sync.manifest import FILE, Manifest, ManifestEntry, opened, unreadable

WRITE_BYTES = 1 << 18  # of one write; a heartbeat may have to wait for one, 0.2 s at 10 Mbit/s

Write = Callable[[bytes], None]  # writes all data, and blocks while the agent is busy (back-pressure)


def offer(manifest: Manifest, indices: Iterable[int], write: Write) -> None:
    """Announce these entries; the last message is marked as the last."""
    for rows, last in batches(_row(index, manifest.entries[index]) for index in indices):
        write(encode_command(Entries(rows, last)))


def answer_missing(manifest: Manifest, missing: Iterable[str], write: Write) -> None:
    """Say which of these paths, which were once copied, are gone. The others are only left out now. Refusal for a path
    that leads out of the folder."""
    gone = [path for path in missing if checked(path) and not manifest.has(path)]
    for paths, last in batches(gone):
        write(encode_command(Remove(paths, last)))


def _row(index: int, entry: ManifestEntry) -> AnnouncedEntry:
    content = entry.sha256 if entry.kind == FILE else entry.target
    return AnnouncedEntry(index, entry.kind, entry.path, entry.mode, entry.mtime, entry.size, content)


def push(manifest: Manifest, wanted: Iterable[int], write: Write, progress: Callable[[int], None]) -> None:
    """Send the current contents of the wanted files. The agent reports those that differ from their announcement.

    Needs about twice WRITE_BYTES of memory. `progress` is called with the number of file bytes in each write.
    LaunchError if a file cannot be read; OSError of `write`.
    """
    pending, content = bytearray(), 0
    for index in wanted:
        for chunk in _chunks(manifest, index):
            head = encode_command(File(index, len(chunk), gone=chunk is _GONE))
            if pending and len(pending) + len(head) + len(chunk) > WRITE_BYTES:
                write(bytes(pending))
                progress(content)
                pending, content = bytearray(), 0
            pending += head
            pending += chunk
            content += len(chunk)
    if pending:
        write(bytes(pending))
        progress(content)


_GONE = memoryview(b"")  # compared by identity, so that an empty file differs from it


def _chunks(manifest: Manifest, index: int) -> Iterator[bytes | memoryview]:
    """The content of a file up to the announced size; _GONE in place of missing bytes."""
    descriptor = opened(manifest.where(index))
    if descriptor is None:
        yield _GONE
        return
    try:
        left = manifest.entries[index].size
        if not left:
            yield b""
        while left:
            chunk = os.read(descriptor, min(left, WRITE_BYTES - 200))
            left -= len(chunk)
            yield chunk or _GONE
            if not chunk:
                return
    except OSError as error:
        raise unreadable(manifest.where(index), error) from None
    finally:
        os.close(descriptor)
