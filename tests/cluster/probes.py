"""What tests ask of hosts."""

import subprocess
import sys
from pathlib import Path

from tests.cluster.ssh_files import dot_ssh
from tests.cluster.testbed import Process, Testbed

SSH = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20"]


def python(program: str, *arguments: object) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", program, *map(str, arguments)]


def output(bed: Testbed, host: str, *argv: str) -> str:
    """What a command prints that is run in /: the caller's folder may be in /tmp, of which each host has its own."""
    done = bed.run(host, argv, cwd="/")
    assert done.returncode == 0, done
    return done.stdout.strip()


def reaches(bed: Testbed, host: str, other: str, seconds: float = 20.0) -> bool:
    """Whether a TCP connection comes about. A refusal needs no time; `seconds` is how long to hope for an answer. Just
    after a cut the kernel still answers "No route to host" for a moment; then it is tried again."""
    connect = 'until why=$( (exec 3<>"/dev/tcp/$0/22") 2>&1 ); do [[ $why == *"No route"* ]] || exit 1; sleep 0.1; done'
    done = bed.run(host, ["timeout", str(seconds), "bash", "-c", connect, bed.address(other)], cwd="/")
    return done.returncode == 0


def with_argv(bed: Testbed, host: str, *argv: str) -> list[Process]:
    return [process for process in bed.processes(host) if process.argv == argv]


def machine() -> tuple[str, ...]:
    """The machine's own network, and what lies in ~/.ssh."""
    show = [["link"], ["address"], ["route", "show", "table", "all"], ["-6", "route", "show", "table", "all"]]
    ssh = [str(path) for path in dot_ssh().glob("*")]
    return (*(subprocess.run(["ip", "-o", *what], capture_output=True, text=True).stdout for what in show), *ssh)


def left_of(bed: Testbed) -> list[str]:
    """Namespaces, and processes in any of them or with one of them in its command line."""
    names = subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout.split()
    marks = (bed.layout.namespace(""), str(bed.folder))
    commands = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            commands.append(path.read_bytes().decode(errors="replace"))
        except OSError:
            continue
    return [each for each in [*names, *commands] if any(mark in each for mark in marks)]
