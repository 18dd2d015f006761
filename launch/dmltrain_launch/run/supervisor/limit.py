"""Time limits, waits and exit codes of a job."""

from __future__ import annotations

import math
from dataclasses import dataclass

LOST_A_PEER = 75  # exit code of a process that exited because it lost another process of the job
USAGE_CODE, TIMEOUT_CODE, FAULT_CODE = 2, 124, 125
SUSPECT_SECONDS = 1.0
TOGETHER_SECONDS = 1.0  # from the first host's failure in the preparation to the job's end
FINISH_SECONDS = 0.5
LATE_SECONDS = 10.0  # for replacements to exit when the scheduler has ended: nobody admits them to the job any more
ANSWER_SECONDS = 3.0  # for an agent's answer, after grace and KILL
AGENT_SILENCE_SECONDS = 10.0  # without a message from the launcher: then an agent ends the job on its host
# For starting another agent in the place of a lost one, to end the job there. A busy host needs seconds for that.
# The second limit is for a host that has not reported the agent's end: it is probably down, and noticing this may have
# taken SILENCE_SECONDS already.
RECONNECT_SECONDS, RECONNECT_LOST_SECONDS = 10.0, 3.5
RECONNECT_ATTEMPTS = 3  # on a host that has reported the agent's end: it runs, and may be too busy for one moment
# Without a message from an agent: then it counts as lost. This is longer than a network outage of 5 s and TCP's
# retransmission pause after it, whose length varies.
SILENCE_SECONDS = 9.5
MOST_DOUBLINGS = 30  # of a wait: more than lead to any limit


@dataclass(frozen=True)
class Limits:
    """Limits in seconds: between TERM and KILL; for the whole job; until all processes have started, without the copy;
    without a message from an agent; without a message from the launcher."""

    grace: float = 5.0
    timeout: float = math.inf
    start: float = math.inf
    silence: float = SILENCE_SECONDS
    agent_silence: float = AGENT_SILENCE_SECONDS


UNLIMITED = Limits()


def as_shell(code: int) -> int:
    """An exit code in the shell's convention: 128 + n for signal n."""
    return code if code >= 0 else 128 - code


def backoff(first: float, longest: float, doublings: int) -> float:
    """The wait before a try: `first`, doubled so many times (never if that is negative), but at most `longest`; s."""
    return min(longest, first * 2.0 ** min(MOST_DOUBLINGS, max(0, doublings)))
