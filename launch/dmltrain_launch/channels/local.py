"""A channel to an agent on this machine."""

from __future__ import annotations

import os
import sys

from dmltrain_launch import channels
from dmltrain_launch.channels.process import ProcessChannel
from dmltrain_launch.job.host import Host


class LocalChannel(ProcessChannel):
    """See `dmltrain_launch.channels`."""

    def __init__(self, host: Host, mark: str):
        command, text = channels.agent_command(host.python or sys.executable)
        super().__init__(command, text, dict(os.environ, DMLTRAIN_AGENT=mark))
