"""Copy the launcher's working directory to a folder on every host before a job starts. Compares files by content.

    sync = Sync(folder, partial(manifest, folder, excludes, leave_out), hosts)
    sync.copy(host, folder, channel.write)    in a thread for each host; a summary, or None if it failed
    sync.take(event)                          for each event of an agent, from any thread; True: handled here
    sync.cancel()                             makes all calls of `copy` return soon
    sync.progress(), sync.lines()             for the display, from any thread

All hosts get the same files; only checkpoints that the job wrote on a host stay there (compare.py). A file
that changes after its announcement is announced again to all hosts, and `copy` returns for no host before all hosts
have it. If a host's folder is the working directory itself, directly or on a shared file system, nothing is copied: the
launcher then sees a file with a random name that the agent created there.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from dmltrain_launch import LaunchError
from dmltrain_launch.agent import Refusal, commands
from dmltrain_launch.agent.copy.receive import ENTRIES
from dmltrain_launch.agent.copy.safe_folder import shown
from dmltrain_launch.agent.events import Event, Missing, Opened, Refused, Synced, Wanted
from dmltrain_launch.agent.protocol import ProtocolError, encode_command
from dmltrain_launch.sync.manifest import Manifest, Over, encoded
from dmltrain_launch.sync.send import Write, answer_missing, offer, push

ROUNDS = 3  # changed files are announced again at most so often
ANSWERS = (Opened, Missing, Wanted, Synced)
NOTES = 10  # of an agent that are printed
ANSWERS_AT_ONCE = 2  # of a host that wait for `copy`, which limits their memory
ANSWER_SECONDS = 10.0  # until `copy` takes one of them
Answer = TypeVar("Answer", bound=Event)
MB = 1e6


@dataclass
class Progress:
    """One host's copy: files and bytes sent and, once its agent has reported them, bytes to send."""

    folder: str = ""  # the destination, as a path on the host
    same: bool = False  # the destination is the source itself
    events: queue.SimpleQueue[Event | None] = field(default_factory=queue.SimpleQueue)
    room: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(ANSWERS_AT_ONCE))
    files: int = 0
    sent: int = 0
    total: int = 0
    version: int = -1  # the version of the manifest that the host has
    notes: tuple[str, ...] = ()  # what was not simply copied


class Sync:
    """See the module. `source(cancelled=...)` returns the manifest of `folder`. It is called once, in one of the
    threads, but not if every host has the folder itself. `copy` raises its LaunchError."""

    def __init__(
        self,
        folder: str | Path,
        source: Callable[..., Manifest],
        hosts: Collection[str],
        patience: float = ANSWER_SECONDS,
    ):
        self._patience = patience
        self.hosts = {host: Progress() for host in hosts}
        self._folder, self._source = os.path.realpath(os.fsencode(folder)), source
        self._cancelled = False
        self._listing = threading.Lock()
        self._all = threading.Condition()  # guards the following attributes and each host's version
        self._manifest: Manifest | None = None
        self._changes: list[tuple[int, ...]] = []  # files announced again: [0] made version 1 of the manifest
        self._copying = set(hosts)

    @property
    def notes(self) -> tuple[str, ...]:
        """Which entries were not copied, and why."""
        return self._manifest.notes if self._manifest else ()

    def take(self, event: Event) -> bool:
        """Handle an agent's event. Returns whether it belongs to the copying only."""
        if event.host in self.hosts and isinstance(event, Refused):
            self.hosts[event.host].events.put(None)
        if event.host not in self.hosts or not isinstance(event, ANSWERS):
            return False
        progress = self.hosts[event.host]
        if not progress.room.acquire(timeout=self._patience):
            raise ProtocolError("more answers about the copy than expected")
        progress.events.put(event)
        return True

    def add(self, host: str) -> None:
        """One more host, before its call of `copy`."""
        with self._all:
            # a new dictionary, because other threads iterate over it without the lock
            self.hosts = {**self.hosts, host: Progress()}
            self._copying.add(host)

    def cancel(self) -> None:
        self._cancelled = True
        with self._all:
            self._all.notify_all()
        for host in self.hosts.values():
            host.events.put(None)

    def progress(self) -> tuple[int, int]:
        """Bytes sent to all hosts, and bytes to send as far as they are known."""
        return sum(host.sent for host in self.hosts.values()), sum(host.total for host in self.hosts.values())

    def lines(self) -> list[str]:
        """A line for each host."""
        return [f"{host}: {self.summary(host)}" for host in self.hosts]

    def summary(self, host: str) -> str:
        """How far the host is: `12 of 340 files, 1.2 MB sent`."""
        if self.hosts[host].same:
            return "has the folder itself, nothing to copy"
        if self._manifest is None:
            return "waiting for the list of files"
        each = self.hosts[host]
        return f"{each.files} of {self._manifest.files} files, {each.sent / MB:.1f} MB sent"

    def copy(self, host: str, folder: str, write: Write) -> str | None:
        """Copy to `folder` on `host`. Returns the summary when all hosts have the same files.

        Returns None if the agent has refused, its channel has broken, or the copying was cancelled: these are reported
        elsewhere. LaunchError if a file cannot be read.
        """

        def guarded(data: bytes) -> None:
            if self._cancelled:
                raise Over
            try:
                write(data)
            except OSError:
                raise Over from None

        try:
            self._copy(host, folder, guarded)
            return self.summary(host)
        except Over:
            return None
        finally:
            with self._all:
                self._copying.discard(host)
                self._all.notify_all()

    def _copy(self, host: str, folder: str, write: Write) -> None:
        progress = self.hosts[host]
        write(encode_command(commands.Sync(folder)))
        answer = self._receive(host, Opened)
        progress.folder = answer.to
        if answer.probe and os.path.lexists(os.path.join(self._folder, encoded(answer.probe))):
            progress.same = True
            return write(encode_command(commands.Same()))
        version, manifest = self._current()
        indices: Collection[int] = range(len(manifest.entries))
        for _ in range(ROUNDS + 1):
            offer(manifest, indices, write)
            changed = self._round(host, manifest, write)
            version, manifest, indices = self._agreed(host, version, changed)
            if not indices:
                return
        names = ", ".join(shown(encoded(manifest.entries[index].path)) for index in list(indices)[:3])
        raise LaunchError(
            f"{names}: keeps changing while it is copied to {host}; "
            f"stop the program that writes it, or exclude it with --sync-exclude"
        )

    def _round(self, host: str, manifest: Manifest, write: Write) -> tuple[int, ...]:
        """Send the files that the agent wants. Returns the files that changed after their announcement."""
        progress = self.hosts[host]
        wanted = self._wanted(host, manifest, write)

        def sent(count: int) -> None:
            progress.sent += count

        push(manifest, wanted, write, sent)
        synced = self._receive(host, Synced)
        progress.files += synced.files
        progress.notes += synced.notes[:NOTES]
        return _known(host, manifest, synced.changed)

    def _wanted(self, host: str, manifest: Manifest, write: Write) -> list[int]:
        """The files that the agent requests. First it may ask about paths that were copied earlier: answer which of
        them are gone from the source."""
        wanted: list[int] = []
        missing: list[str] = []
        last = False
        while not last:
            answer = self._receive(host, Missing, Wanted)
            if isinstance(answer, Wanted):
                wanted += _known(host, manifest, answer.entries)
                self.hosts[host].total += answer.bytes
                last = answer.last
            elif isinstance(answer, Missing):
                missing += answer.paths
                if len(missing) > ENTRIES:
                    raise LaunchError(f"the agent on {host} asks about more than {ENTRIES} files", 125)
                if answer.last:
                    self._answer_missing(host, manifest, missing, write)
            if len(wanted) > len(manifest.entries):
                raise LaunchError(f"the agent on {host} requests more files than there are", 125)
        return wanted

    def _answer_missing(self, host: str, manifest: Manifest, missing: list[str], write: Write) -> None:
        try:
            answer_missing(manifest, missing, write)
        except Refusal:
            raise LaunchError(f"the agent on {host} asks about a path outside of the copied folder", 125) from None

    def _receive(self, host: str, *expected: type[Answer]) -> Answer:
        event = self.hosts[host].events.get()
        self.hosts[host].room.release()
        if event is None or self._cancelled:
            raise Over
        if not isinstance(event, expected):
            names = " or ".join(kind.__name__ for kind in expected)
            message = f"the agent on {host} sent {type(event).__name__}; expected {names}"
            raise LaunchError(message, 125)
        return event

    def _current(self) -> tuple[int, Manifest]:
        with self._listing:
            if self._manifest is None:
                self._manifest = self._source(cancelled=lambda: self._cancelled)
        with self._all:
            return len(self._changes), self._manifest

    def _agreed(self, host: str, version: int, changed: Collection[int]) -> tuple[int, Manifest, list[int]]:
        """Wait for the other hosts. Returns the current version and manifest, and the files to announce again.

        There are none when all hosts have the same files.
        """
        with self._all:
            assert self._manifest is not None
            new = set(changed).difference(*self._changes[version:])
            if new:
                self._manifest, still = self._manifest.renewed(sorted(new))
                self._changes.append(still)
            while True:
                again = {index for changes in self._changes[version:] for index in changes}
                if again:
                    return len(self._changes), self._manifest, sorted(again)
                version = self.hosts[host].version = len(self._changes)
                self._all.notify_all()
                self._all.wait_for(lambda: self._cancelled or self._is_settled(version))  # noqa: B023  called here only
                if self._cancelled:
                    raise Over
                if len(self._changes) == version:
                    return version, self._manifest, []

    def _is_settled(self, version: int) -> bool:
        """Whether there is a newer version, or all hosts have this one."""
        return len(self._changes) > version or all(self.hosts[host].version == version for host in self._copying)


def _known(host: str, manifest: Manifest, indices: tuple[int, ...]) -> tuple[int, ...]:
    if indices and max(indices) >= len(manifest.entries):
        raise LaunchError(f"the agent on {host} names file {max(indices)} of {len(manifest.entries)}", 125)
    return indices
