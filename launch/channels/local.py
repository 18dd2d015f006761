"""A channel to an agent on this machine."""

from __future__ import annotations

import os
import sys

from launch import channels
from launch.channels.process import ProcessChannel
from launch.job.host import Host


class LocalChannel(ProcessChannel):
    """See `launch.channels`."""

    def __init__(self, host: Host, mark: str):
        command, text = channels.agent_command(host.python or sys.executable)
        super().__init__(command, text, dict(os.environ, DMLTRAIN_AGENT=mark))
