"""The agent: the one program that runs on each host of a job, beside the job's processes.

Contract: standard library only, Python 3.8 or later, because its modules are sent in one text down its own standard
input (`launch.agent.bundle`) to hosts that have nothing installed. It knows nothing of roles or of training: it starts
the processes it is told to, forwards their output, reports exits in order, and leaves no process behind.

The protocol is in `launch.agent.protocol`, its messages in `launch.agent.commands` and `launch.agent.events`. When the
output backs up, the agent stops reading from the processes, so a process that prints too much slows itself and costs
no memory.

Loss of the launcher: when standard input ends or is silent for `silence` seconds, the agent does what `Stop` does and
writes its last line into <log_folder>/agent-<host>.log, as no one else can.

Processes of a job: everything that descends from the agent (it is a subreaper, so orphans stay below it), and
everything whose environment has DMLTRAIN_JOB=<mark>, with descendants: daemons, and processes that a killed agent left.
"""

from __future__ import annotations

KILL_SECONDS = 3.0  # how long a killed process may take to disappear


class Refusal(Exception):
    """The host cannot do what was requested; `code` is the launcher's exit code."""

    def __init__(self, message: str, code: int):
        super().__init__(message)
        self.code = code
