"""A job with --detach, as its launcher has it: the job lives on when this launcher leaves or dies (kept_job.py)."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

from dmltrain_launch import NAME, version
from dmltrain_launch.run import journal, report
from dmltrain_launch.run.background import into_background
from dmltrain_launch.run.journal import Beginning, Journal, JournalContent
from dmltrain_launch.run.kept_job import KeptJob
from dmltrain_launch.run.repeated import Repeated
from dmltrain_launch.run.supervise import Supervisor
from dmltrain_launch.run.supervisor.action import Continue
from dmltrain_launch.terminal.log_folder import JOURNAL, LogFolder, is_full
from dmltrain_launch.terminal.output import Output

RETRY_SECONDS = 1.0  # between attempts to write to a full disk
REQUESTS = 1 << 20  # numbers of requests for each launcher, so that no launcher uses one of an earlier launcher


class Keeper:
    """`started` is called once when all processes run, with a text for the user: from then on this launcher has no
    terminal. `taken`: what the journal says of a job that another launcher has started, and its length in bytes.

    `foreground`: a user waits for this launcher, so no other one may take the job. Call `use` first.
    """

    def __init__(self, started: Callable[[str], None] | None = None, taken: tuple[JournalContent, int] | None = None):
        self._started, self._taken = started, taken
        self._repeated: Repeated | None = None
        self.foreground = taken is not None
        self._left = False

    def use(self, folder: LogFolder, say: Callable[[str], None]) -> None:
        """Keep the job in this folder."""
        self._folder, self._retry = folder, FullDiskRetry(say)
        folder.retry = self._retry
        if self._taken:
            self._retry.wait()

    @property
    def first_request(self) -> int:
        return (self._taken[0].lease + 1) * REQUESTS if self._taken else 0

    def repeat(self, supervisor: Supervisor) -> Supervisor:
        """The supervisor as the launcher before this one had it."""
        if self._taken:
            self._repeated = Repeated(supervisor, self._taken[0])
        return supervisor

    def greeting(self, supervisor: Supervisor, path: Path) -> list[str]:
        """What to say at the start of this launcher, but not of the job."""
        if self._taken is None:
            return []
        attached = f"{NAME}: attached to job {supervisor.job.name}, logs in {path}"
        return [attached, *(f"{NAME}: {line}" for line in report.losses(supervisor))]

    def kept(self, beginning: Beginning, output: Output) -> KeptJob:
        """What the session is given. `beginning`: of a new job."""
        folder, may_leave = self._folder.path, lambda: not self.foreground
        kept = journal.Kept(folder, self._retry)
        if not self._taken or not self._repeated:
            return KeptJob(Journal(folder, version(), retry=self._retry), kept, output, beginning, may_leave)
        _expect_again(output, kept, self._repeated)
        content, size = self._taken
        again = Journal(folder, version(), size, self._retry)
        return KeptJob(again, kept, output, self._repeated, may_leave, content.lease)

    def news(self, text: str) -> None:
        """All processes run. `text`: for the user, if this launcher leaves the terminal now."""
        self._retry.wait()
        if self._started:
            started, self._started = self._started, None
            os.setsid()
            started(text)
            self._to_background()

    def leave(self) -> None:
        """The job goes on without this launcher."""
        self._left = True
        self._retry.give_up()  # another launcher may write to the logs from now on

    def interrupted(self, number: int) -> bool:
        """Whether this signal ends the job. SIGHUP does not, because it only says that the terminal has closed."""
        if number == signal.SIGHUP:
            self._to_background()
        else:
            self._retry.give_up()
        return number != signal.SIGHUP

    def _to_background(self) -> None:
        self.foreground = False
        into_background(self._folder.path)

    @property
    def has_journal(self) -> bool:
        """Then the job goes on when this launcher fails."""
        return (self._folder.path / JOURNAL).exists()

    def end(self) -> None:
        """This launcher ends, and the job as well unless it has left it."""
        if not self._left:
            journal.remove(self._folder.path)


def _expect_again(output: Output, kept: journal.Kept, repeated: Repeated) -> None:
    """Make the output expect the processes that the launcher before this one has started."""
    for action in repeated.opened:
        if isinstance(action, Continue):
            output.add(action.task)
        else:
            output.open(action.name)
    names: dict[str, list[int]] = {}
    for number, process in enumerate(repeated.supervisor.processes):
        names.setdefault(process.task.name, []).append(number)
    for tasks in names.values():
        for task in tasks:
            output.expect_again(task, kept.size(tasks))


class FullDiskRetry:
    """Makes writes wait for room on a full disk, because the job lives on without its launcher.

    Call it with the error of a write. It returns whether to try the write again: after RETRY_SECONDS, if the disk is
    full, `wait` was called, and `give_up` was not. `say` gets one warning for each new error.
    """

    def __init__(self, say: Callable[[str], None]):
        self._say, self._said = say, ""
        self._waits = False
        self._given_up = threading.Event()

    def wait(self) -> None:
        self._waits = True

    def give_up(self) -> None:
        self._given_up.set()

    def __call__(self, error: OSError) -> bool:
        if not self._waits or not is_full(error) or self._given_up.is_set():
            return False
        text = str(error.strerror)
        if text != self._said:
            self._said = text
            self._say(
                f"{NAME}: warning: {text} for the log folder: the job goes on, and its output waits for room there"
            )
        return not self._given_up.wait(RETRY_SECONDS)
