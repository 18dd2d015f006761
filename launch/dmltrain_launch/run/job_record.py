"""What a launcher tells the user and writes into job.json, for all attempts of a job: without the job's secrets."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from dmltrain_launch import NAME, LaunchError, version
from dmltrain_launch.job.options import Options
from dmltrain_launch.run import record
from dmltrain_launch.run.supervisor.attempt import Attempt
from dmltrain_launch.run.supervisor.event import Copied, Event
from dmltrain_launch.run.supervisor.limit import FAULT_CODE
from dmltrain_launch.secret import redact, redact_all
from dmltrain_launch.terminal.log_folder import LogFolder


class JobRecord:
    """`folder`: of the first attempt. `began`: s since 1970. `hidden`: texts that are never shown.

    `ends`: of the earlier attempts. `control`: the name of the control socket, or "".
    """

    def __init__(
        self, folder: LogFolder, options: Options, began: float, hidden: Sequence[str], say: Callable[[str], None]
    ):
        self.folder, self._options, self.began, self._hidden, self._say = folder, options, began, hidden, say
        self.ends: list[dict[str, Any]] = []
        self.control = ""

    # -- for the user --------------------------------------------------------------------------------------------

    def redacted(self, line: str) -> str:
        return redact(line, self._hidden)

    def say(self, line: str) -> None:
        self._say(self.redacted(line))

    def say_lines(self, lines: Sequence[str]) -> None:
        for line in lines:
            self.say(line if line.startswith(" ") else f"{NAME}: {line}")

    def trace(self, event: Event) -> None:
        """Tell of an event: the end of a host's copy, and with --log-level DEBUG any."""
        if isinstance(event, Copied):
            for line in (event.summary, *event.notes):
                self.say(f"{NAME}: {event.host}: {line}")
        if self._options.log_level == "DEBUG":
            shown = replace(event, **redact_all(vars(event), self._hidden))  # before repr adds quotes
            self.say(f"{NAME}: debug: {shown}")

    # -- job.json ------------------------------------------------------------------------------------------------

    def write(self, attempt: Attempt, ended: float | None = None) -> None:
        for warning in attempt.take_warnings():
            self.say(f"{NAME}: warning: {warning}")
        self._write(record.record(attempt, version(), self._options, self.began, ended, self.control))

    def write_failure(self, attempt: Attempt, error: LaunchError | OSError) -> None:
        """The end of an attempt that failed on this machine, such as for lack of disk space or descriptors."""
        facts = record.record(attempt, version(), self._options, self.began, time.time())
        end = {"exit_code": error.code if isinstance(error, LaunchError) else FAULT_CODE, "cause": str(error)}
        with contextlib.suppress(LaunchError):
            self._write({**facts, **end, "cause_log": None})

    def _write(self, facts: dict[str, Any]) -> None:
        self.folder.write_record({**redact_all(facts, self._hidden), "restarts": self.ends})

    def restart(self, attempt: Attempt, folder: str) -> int:
        """Another attempt follows this one, whose logs are in `folder`. Returns the number of the restart."""
        self.ends.append(redact_all(record.end_of_attempt(attempt, folder), self._hidden))
        return len(self.ends)
