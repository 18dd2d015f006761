"""The agent: the one program that runs on each host of a job, beside the job's processes.

Contract: standard library only, Python 3.8 or later, because its modules are sent in one text down its own standard
input (`launch.agent.bundle`) to hosts that have nothing installed. It knows nothing of roles or of training: it starts
what it is told, passes on what that prints, reports exits in the order they happened, and leaves no process behind.

Theory of operation. Standard input carries one JSON object per line from the launcher:
    {"do": "job", "mark", "host", "key", "silence", "grace", "log_folder"}           answered by `ready`
    {"do": "sync", ...}, {"do": "file", ...}  copy the launcher's folder here: see `launch.agent.receive`
    {"do": "probe", "request": {...}}         look at the host: see `launch.agent.probe`; answered by `probed`
    {"do": "bind", "address", "scheduler", "master", "reach", "throughput"}   hold these ports; answered by `bound`
    {"do": "reach", "peers": [[name, address, port]]}           try the other hosts; answered by `reached`
    {"do": "measure", "peer": [name, address, port]}  what TCP carries to it and back; answered by `measured`
    {"do": "start", "unset": [names], "tasks": [{"task", "argv", "environment", "workdir", ...}]}  by `started`
    {"do": "stop", "grace": seconds, "dump"}  TERM, after `grace` KILL, answered by `ended`; the agent then exits
    {"do": "list", "mark"}                    whatever runs of that job, for a visitor; answered by `listing`
    {"do": "beat"}                            the launcher lives; answered by `beat`
Standard output carries HELLO and then frames: kind (1 byte), task (2), length (4), payload. An OUTPUT frame is
what a process wrote, byte for byte; an EVENT frame is a JSON object with "event". When the output backs up, the
agent stops reading from the processes, so a process that prints too much slows itself and costs no memory.

The life line: when standard input ends or is silent for `silence` seconds, the agent does what `stop` does, and
writes its last line into <log_folder>/agent-<host>.log, as nobody else can.

Whose processes: everything that descends from the agent (it is a subreaper, so orphans stay below it), and
everything whose environment has DMLTRAIN_JOB=<mark>, with descendants: daemons and leavings of a killed agent.
"""

from __future__ import annotations

import struct

HELLO = b"\0dmltrain-agent 1\n"  # what comes before it on standard output is a login script's chatter
HEADER = struct.Struct("!BHI")  # kind, task, length of the payload in bytes
OUTPUT, EVENT = 1, 2
NO_TASK = 0xFFFF
KILL_SECONDS = 3.0  # how long a killed process may take to vanish


class Refusal(Exception):
    """What was asked cannot be done here; `code` is the exit code it asks of the launcher."""

    def __init__(self, message: str, code: int):
        super().__init__(message)
        self.code = code
