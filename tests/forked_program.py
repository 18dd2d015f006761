"""A stand-in for a program that takes long to import what it needs: python -IS forked_program.py SOCKET program
argument...

It asks the process behind SOCKET (tests/forked_job.py), which has imported it, to fork one that runs the program with
this process' environment, folder, outputs, priority, namespaces and signals that are ignored. It passes signals on, and
ends as the program does; if it is killed, the program is. What is to be stopped, or is about imports, needs a process
of its own. Built-in modules only: those that Python is made with take no time.
"""

import _signal
import _socket
import marshal
import os
import sys

PASSED_ON = (_signal.SIGTERM, _signal.SIGINT, _signal.SIGHUP, _signal.SIGUSR1, _signal.SIGUSR2, _signal.SIGABRT)


def inherited() -> list:
    """The numbers of the descriptors that this process has got."""
    with os.scandir("/proc/self/fd") as entries:
        numbers = [int(entry.name) for entry in entries]
    return [number for number in numbers if os.path.exists(f"/proc/self/fd/{number}")]  # all but that of the folder


def ask(connection: _socket.socket, command: list, descriptors: list) -> int:
    """Have the program started with these descriptors. Returns its id."""
    request = {"command": command, "environment": dict(os.environ), "folder": os.getcwd(), "descriptors": descriptors}
    request["ignored"] = [number for number in PASSED_ON if _signal.getsignal(number) == _signal.SIG_IGN]
    numbers = b"".join(number.to_bytes(4, sys.byteorder) for number in descriptors)
    connection.sendmsg([marshal.dumps(request)], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, numbers)])
    return int(connection.recv(100))


def pass_on(pid: int, number: int) -> None:
    try:  # noqa: SIM105  contextlib takes time to import
        os.kill(pid, number)
    except ProcessLookupError:  # it has just ended
        pass


def end_as(code: int) -> None:
    if code < 0:
        if code != -_signal.SIGKILL:
            _signal.signal(-code, _signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    place, *command = sys.argv[1:]
    descriptors = inherited()
    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    connection.connect(place)
    pid = ask(connection, command, descriptors)
    for number in PASSED_ON:
        _signal.signal(number, lambda number, frame: pass_on(pid, number))
    end_as(int(connection.recv(100)))
