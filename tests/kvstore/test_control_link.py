"""A process's control link to the scheduler."""

import socket
import time
from dataclasses import replace

from dmltrain.env import Environment
from dmltrain.kvstore.scheduler.client import Control
from dmltrain.kvstore.scheduler.process import SchedulerProcess
from tests.kvstore.whole_job import NEVER, begun

SECONDS = 30.0
LOST_SECONDS = 1.0


def test_the_time_until_the_scheduler_starts_is_no_silence():
    """Processes may start long before the scheduler, on a slow machine or by hand."""
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    listening.close()
    environment = Environment(
        job="job",
        key=b"key",
        num_workers=2,
        num_servers=0,
        root_port=port,
        lost_seconds=LOST_SECONDS,
        heartbeat_seconds=0.1,
    )
    early = begun(Control, replace(environment, role="worker", index=0), 0, None, NEVER)
    time.sleep(1.5 * LOST_SECONDS)
    ended = begun(lambda: SchedulerProcess(replace(environment, role="scheduler")).run())
    first = early.result(SECONDS)  # it has registered, and hears nothing yet
    second = Control(replace(environment, role="worker", index=1), 0, None, NEVER)
    for control in (first, second):
        control.wait_for_start()
        control.bye()
    assert ended.result(SECONDS) == ""
    for control in (first, second):
        control.close()
