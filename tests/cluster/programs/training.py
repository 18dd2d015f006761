"""A job that trains, without a model, as far as the test lets it. Arguments: phase, folder of the files they talk by.

before   the process with a file `doomed-ROLE-RANK` kills itself at once, before it has imported anything
start    the last worker joins when there is a file `go`: until then the others wait for it
middle   rounds without end, until all agree in one that there is a file `go`
exit     after a few rounds worker 0 ends, and the others close when there is a file `go`
It prints `begun`, `ready` after the first round, and `closing`.
"""

import os
import signal
import sys
import time
from pathlib import Path

phase, folder = sys.argv[1], Path(sys.argv[2])
role, rank, workers = os.environ["DMLC_ROLE"], int(os.environ["DMLC_TASK_ID"]), int(os.environ["DMLC_NUM_WORKER"])
if phase == "before" and (folder / f"doomed-{role}-{rank}").exists():
    (folder / "struck").touch()
    os.kill(os.getpid(), signal.SIGKILL)

print("begun", flush=True)
END = time.monotonic() + 120  # whatever happens to the test
PAUSE = 0.1  # s between rounds, as computing gradients takes: the test bed's hosts share few cores


def may_go() -> bool:
    return (folder / "go").exists() or time.monotonic() > END


def wait_to_go() -> None:
    while not may_go():
        time.sleep(0.02)


if phase == "start" and (role, rank) == ("worker", workers - 1):
    wait_to_go()

import numpy as np  # noqa: E402  the file's head is what runs before any import

from dmltrain import kvstore  # noqa: E402
from dmltrain.base import errors  # noqa: E402

errors.end_scripts_without_traceback()
kv = kvstore.create("dist_sync")
gradient, total = np.zeros(100_000, np.float32), np.zeros(100_000, np.float32)
kv.init("w", gradient)
rounds = 0
while not total[0] and (phase == "middle" or rounds < 5):
    gradient[:] = phase == "middle" and may_go()  # what one worker knows in a round, all know after it
    kv.pushpull("w", gradient, total)
    rounds += 1
    if rounds == 1:
        print("ready", flush=True)
    time.sleep(PAUSE)
print("closing", flush=True)
if phase == "exit" and rank > 0:
    wait_to_go()
kv.close()
