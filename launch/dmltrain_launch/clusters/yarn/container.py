"""What runs in the containers of a job in YARN. All of them see the job's folder of logs.

    python -m dmltrain_launch.clusters.yarn.container launcher FOLDER WORKDIR HOSTS GPUS WORD...
    python -m dmltrain_launch.clusters.yarn.container host FOLDER INDEX

The launcher, whose command line is WORD..., writes its output to OUTPUT, with its exit code in the last line, and its
own logs to the container's folder: who follows the job copies them from that output. A host waits for SETTINGS, which
the launcher writes, and becomes a bridge. Arguments are percent-encoded.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote

from dmltrain_launch.channels.bridges.bridge import VARIABLE
from dmltrain_launch.channels.bridges.engine import bridge_program
from dmltrain_launch.channels.exit_text import exit_text
from dmltrain_launch.clusters.queue import FAULT_CODE, FOLLOWED, SUBMITTED
from dmltrain_launch.own_program import own_program

OUTPUT, SETTINGS = "launcher.out", "bridge.json"
END = "dmltrain-exit"  # and the launcher's exit code: the last line of OUTPUT
INSIDE = "DMLTRAIN_YARN"  # of the launcher: its folder, how many hosts it has, GPUs of each
LOOK_SECONDS = 0.2
WAIT_SECONDS = 3600.0  # of a host for its launcher
SIGNALLED = 128


def launcher(folder: str, workdir: str, hosts: str, gpus: str, *words: str) -> int:
    settings = json.dumps({"folder": folder, "hosts": int(hosts), "gpus": int(gpus)})
    environment = {**os.environ, SUBMITTED: FOLLOWED, INSIDE: settings, "PYTHONUNBUFFERED": "1"}
    logs = os.path.join(os.getcwd(), "logs")
    argv = [*own_program(sys.executable, "dmltrain_launch.cli"), "--log-dir", logs, *words]
    with open(os.path.join(folder, OUTPUT), "ab") as output:
        try:
            code = subprocess.run(argv, stdout=output, stderr=output, cwd=workdir, env=environment).returncode
        except OSError as error:
            output.write(f"cannot start the launcher in {workdir}: {error.strerror}\n".encode())
            code = FAULT_CODE
        if code < 0:
            output.write(f"the launcher {exit_text(code)}\n".encode())
        code = code if code >= 0 else SIGNALLED - code
        output.write(f"{END} {code}\n".encode())
    return code


def host(folder: str, index: str) -> int:
    """Become the bridge with this number."""
    path, until = Path(folder, SETTINGS), time.monotonic() + WAIT_SECONDS
    while not path.exists():
        if time.monotonic() > until:
            print(f"no {path} after {WAIT_SECONDS:g} s: the launcher has not started", file=sys.stderr)
            return FAULT_CODE
        time.sleep(LOOK_SECONDS)
    argv = [sys.executable, *shlex.split(bridge_program(index))]
    os.execve(sys.executable, argv, {**os.environ, VARIABLE: path.read_text()})


def main(argv: Sequence[str]) -> int:
    what, *words = map(unquote, argv)
    return launcher(*words) if what == "launcher" else host(*words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
