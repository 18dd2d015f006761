"""The engine in the sense of `dmltrain_launch.channels.bridges.engine`: sends one order to the driver, prints its
answers.

    python relay.py SOCKET ORDER

The driver (`ray.driver`) listens at the abstract socket SOCKET. The order is sent together with the settings of the
bridges, which are in the environment, and only to a process of this user. When this program ends, the driver ends the
bridges of its order that still run. It ignores SIGTERM: `ray job stop` sends it to all processes below the launcher,
but the launcher must end them in order. It uses the standard library only, and nothing of `dmltrain_launch`, so that it
starts quickly.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import sys

CREDENTIALS = struct.Struct("3i")  # pid, uid and gid of the process at the other end
VARIABLE = "DMLTRAIN_BRIDGE"  # as in `dmltrain_launch.channels.bridges.bridge`
FAULT_CODE = 125  # as in `dmltrain_launch.run.supervisor.limit`


def main(name: str, order: str) -> int:
    link = socket.socket(socket.AF_UNIX)
    try:
        link.connect("\0" + name)
        peer = CREDENTIALS.unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
        if peer[1] != os.geteuid():
            print("another user's process has the name of the program that talks to Ray", file=sys.stderr)
            return 1
        link.sendall(json.dumps({**json.loads(order), "settings": os.environ[VARIABLE]}).encode() + b"\n")
        with link.makefile(encoding="utf-8") as answers:
            for line in answers:
                answer = json.loads(line)
                if "code" in answer:
                    return int(answer["code"])
                print(answer["said"], flush=True)
    except OSError as error:
        print(error, file=sys.stderr)
    print("the program that talks to Ray has ended", file=sys.stderr)
    return FAULT_CODE


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(main(*sys.argv[1:]))
