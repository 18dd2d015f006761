"""The agent: the program that runs on each host of a job and starts, watches and ends the job's processes there.

Contract: standard library only, Python 3.8 or later, because its sources are sent as one text to its standard input
(`dmltrain_launch.channels.agent_text`), to hosts that have nothing installed. It knows nothing about roles or training:
it starts the requested processes, forwards their output, reports exits in order, and leaves no process behind.

The protocol is in `dmltrain_launch.agent.protocol`, its messages in `dmltrain_launch.agent.commands` and
`dmltrain_launch.agent.events`. When too much output is unsent, the agent stops reading from the processes. A process
that prints too much then waits and costs no memory.

Loss of the launcher: when standard input ends or is silent for `silence` seconds, the agent does the same as for `Stop`
and writes its last lines into <log_folder>/agent-<host>.log.

Processes of a job: all descendants of the agent (it is a subreaper, so orphans stay below it), and all processes with
DMLTRAIN_JOB=<mark> in their environment, with descendants: daemons, and processes that a killed agent left.
"""

from __future__ import annotations

KILL_SECONDS = 3.0  # a killed process disappears within this time, or is reported as left


class Refusal(Exception):
    """The host cannot do what was requested; `code` is the launcher's exit code."""

    def __init__(self, message: str, code: int):
        super().__init__(message)
        self.code = code
