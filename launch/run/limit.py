"""The times and exit codes of a job."""

from __future__ import annotations

import math
from dataclasses import dataclass

LOST_A_PEER = 75  # exit code of a process that ended because another process of the job was lost
USAGE_CODE, TIMEOUT_CODE, FAULT_CODE = 2, 124, 125
SUSPECT_SECONDS = 1.0
TOGETHER_SECONDS = 1.0  # between the first host that cannot do a step of the preparation and the job's end
FINISH_SECONDS = 0.5
ANSWER_SECONDS = 3.0  # how long an agent may take to answer beyond what it was given
AGENT_SILENCE_SECONDS = 10.0  # without a message from the launcher, an agent ends the job on its host
SILENCE_SECONDS = 9.5  # without a message from an agent, the launcher gives it up


@dataclass(frozen=True)
class Limits:
    """Seconds: between TERM and KILL, for the whole job, until the first process starts (copying excluded), and of
    silence on either side of a channel."""

    grace: float = 5.0
    timeout: float = math.inf
    start: float = math.inf
    silence: float = SILENCE_SECONDS
    agent_silence: float = AGENT_SILENCE_SECONDS


UNLIMITED = Limits()


def as_shell(code: int) -> int:
    """An exit code as a shell gives it: 128 + n for signal n."""
    return code if code >= 0 else 128 - code
