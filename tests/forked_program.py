"""A stand-in for a program that needs PyTorch or MXNet: python -IS forked_program.py SOCKET program argument...

It asks the process behind SOCKET (tests/forked_job.py), which has imported the framework, to fork one that runs the
program with this process' environment, folder, outputs and namespaces. It passes signals on, and ends as the program
does; if it is killed, the program is. What is to be stopped, or gets a signal only if it handles it (a notice of an
agent), or is about imports, needs a process of its own.
"""

import json
import os
import signal
import socket
import sys

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGABRT)


def inherited() -> list:
    """The numbers of the descriptors that this process has got."""
    with os.scandir("/proc/self/fd") as entries:
        numbers = [int(entry.name) for entry in entries]
    return [number for number in numbers if os.path.exists(f"/proc/self/fd/{number}")]  # all but that of the folder


def ask(connection: socket.socket, command: list, descriptors: list) -> int:
    """Have the program started with these descriptors. Returns its id."""
    request = {"command": command, "environment": dict(os.environ), "folder": os.getcwd(), "descriptors": descriptors}
    socket.send_fds(connection, [json.dumps(request).encode()], descriptors)
    return json.loads(connection.recv(100))


def end_as(code: int) -> None:
    if code < 0:
        if code != -signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    place, *command = sys.argv[1:]
    descriptors = inherited()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(place)
        pid = ask(connection, command, descriptors)
        for number in PASSED_ON:
            signal.signal(number, lambda number, frame: os.kill(pid, number))
        end_as(json.loads(connection.recv(100)))
