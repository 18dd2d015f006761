"""The engine in the sense of `dmltrain_launch.channels.bridges.engine`: gives one order to the driver, prints what it
answers.

    python ray_relay.py SOCKET ORDER

The driver (`ray_driver`) listens at the abstract socket SOCKET. The order goes to it with the settings of the bridges,
which are in the environment: to a process of this user only. When this program ends, the driver ends what is left of
the bridges of its order.
It ignores SIGTERM: `ray job stop` sends that to all processes below the launcher, which is to end them in order.
Standard library only, and nothing of `dmltrain_launch`, because it is to start quickly.
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
    return 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(main(*sys.argv[1:]))
