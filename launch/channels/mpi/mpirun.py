"""mpirun: its version, its command line, and the process with its output.

Settings and their reasons: processes are not bound to cores, because the job's processes would inherit the bridge's
core. mpirun does not limit slots; the launcher does. The launcher's machine connects to every host itself
(`no_tree_spawn`), because often only it has the key. Host names are not cut at the first dot. `-wdir /` is used because
the launcher's folder may not exist on the hosts. Bridges get their settings in the environment, because argv is public.
(mpirun's own connections are not protected.) Set a host's user and port in ~/.ssh/config: mpirun accepts neither.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from launch import LaunchError
from launch.channels.exit_text import exit_text
from launch.job.host import Host

OPEN_MPI, MPICH = "Open MPI", "MPICH"
KINDS = {OPEN_MPI: re.compile(r"Open MPI|OpenRTE|PRRTE"), MPICH: re.compile(r"HYDRA|Intel\(R\) MPI")}  # in --version
ENVIRONMENT = {
    **{"OMPI_MCA_plm_rsh_no_tree_spawn": "1", "OMPI_MCA_orte_keep_fqdn_hostnames": "1"},  # Open MPI up to 4
    **{"PRTE_MCA_plm_ssh_no_tree_spawn": "1", "PRTE_MCA_prte_keep_fqdn_hostnames": "1"},  # from 5
}
VERSION_SECONDS = 10.0
END_SECONDS = 0.5  # between SIGTERM and SIGKILL, which also ends its daemons on the hosts
LAST_OUTPUT_SECONDS = 0.5  # for reading mpirun's output after its exit
OUTPUT_BYTES = 16_000
OUTPUT_LINES = 30
# Open MPI and the ssh that it starts both put that ssh into its own process group; the second to do so may be refused.
HARMLESS = re.compile(r"plm:rsh: Warning: setpgid\(")
ROOT = re.compile(r"allow-run-as-root|run(ning)? as root", re.IGNORECASE)
ROOT_FIX = (
    "With dmltrain-launch use --mpirun-args=--allow-run-as-root, "
    "or set OMPI_ALLOW_RUN_AS_ROOT=1 and OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 on this machine"
)


def kind(mpirun: str) -> str:
    """Which MPI the program `mpirun` belongs to; LaunchError if it is missing or unknown."""
    if not shutil.which(mpirun):
        raise LaunchError(
            f"{mpirun} is not installed here: install Open MPI (Debian, Ubuntu: openmpi-bin; Fedora, RHEL: openmpi) or "
            "MPICH (mpich) on every host, or give its path with --mpirun PATH",
            127,
        )
    try:
        ran = subprocess.run(
            [mpirun, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            errors="replace",
            timeout=VERSION_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{mpirun} --version: {error}", 126) from None
    output = ran.stdout + ran.stderr
    found = next((name for name, sign in KINDS.items() if sign.search(output)), None)
    if not found:
        first = next(iter(output.strip().splitlines()), "nothing")
        raise LaunchError(f"{mpirun} --version printed {first!r}: expected Open MPI or MPICH (--mpirun PATH)")
    return found


def check(hosts: Sequence[Host]) -> None:
    """LaunchError for a host with attributes that mpirun does not support."""
    for host in hosts:
        where = f"{host.where}: " if host.where else ""
        if host.user or host.port:
            lines = [f"User {host.user}"] * bool(host.user) + [f"Port {host.port}"] * bool(host.port)
            block = "".join(f"\n        {line}" for line in lines)
            raise LaunchError(
                f"{where}mpirun takes no user and no port for {host.target}: remove them there, and add to "
                f"~/.ssh/config\n    Host {host.target}{block}"
            )
        if re.search(r"[:,\s]", host.target) or host.target.startswith("-"):
            raise LaunchError(f"{where}mpirun does not accept the host {host.target!r}: use a name or an IPv4 address")


def command(
    mpirun: str,
    kind: str,
    arguments: Sequence[str],
    hosts: Sequence[Host],
    bridges: Sequence[Sequence[str]],
    variable: str,
) -> list[str]:
    """argv of the mpirun that runs bridges[i] as process i, on hosts[i], with the environment's `variable`. Pure."""
    if kind == OPEN_MPI:
        whole = ["--bind-to", "none", "--oversubscribe"]
        each = [["-np", "1", "-host", f"{host.target}:1", "-wdir", "/", "-x", variable] for host in hosts]
    else:
        whole = ["-genvlist", variable, "-hosts", ",".join(f"{host.target}:1" for host in hosts)]
        each = [["-np", "1", "-wdir", "/"]] * len(hosts)
    argv = [mpirun, *arguments, *whole]
    for position, (options, bridge) in enumerate(zip(each, bridges, strict=True)):
        argv += [":"] * (position > 0) + [*options, *bridge]
    return argv


def bridge_command(host: Host, index: int, variable: str) -> list[str]:
    """The command of bridge `index`, which finds its program in the environment's `variable`. Pure.

    The shell hides the death of a bridge by a signal, for which mpirun would end all other bridges. A bridge that
    fails exits with a code below 128, and then mpirun is to end.
    """
    fallback = "" if host.python else 'command -v "$p" >/dev/null 2>&1 || p=python3; '
    load = f'import json, os; exec(json.loads(os.environ["{variable}"])["program"])'
    return [
        "/bin/sh",
        "-c",
        f"p={shlex.quote(host.python or sys.executable)}; {fallback}"
        f'"$p" -I -S -X utf8 -c {shlex.quote(load)} dmltrain-bridge {index}; s=$?; [ $s -le 128 ] || s=0; exit $s',
    ]


class Mpirun:
    """A running mpirun, in its own session, so that Ctrl-C does not end it. `on_end(code)` is called in a thread."""

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str], on_end: Callable[[int], None]):
        self._printed, self._on_end = bytearray(), on_end
        self._ended = threading.Event()
        try:
            self.process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                bufsize=0,
                # `environment` comes first, because MPICH 4.0 does not pass on the last variable of its environment
                env={**environment, **ENVIRONMENT, **os.environ, **environment},
                start_new_session=True,
            )
        except OSError as error:
            raise LaunchError(f"cannot start {argv[0]}: {error.strerror}", 126) from None
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        threading.Thread(target=self._wait, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout
        with self.process.stdout as output:
            while data := output.read(OUTPUT_BYTES):
                self._printed += data
                del self._printed[:-OUTPUT_BYTES]

    def _wait(self) -> None:
        code = self.process.wait()
        self._reader.join(LAST_OUTPUT_SECONDS)  # limited, because an ssh that it left may hold the pipe open
        self._ended.set()
        self._on_end(code)

    @property
    def output(self) -> str:
        """The last lines that it printed, without rulers and harmless warnings."""
        lines = [line.rstrip() for line in bytes(self._printed).decode(errors="replace").splitlines()]
        return "\n".join([line for line in lines if line.strip("-= ") and not HARMLESS.search(line)][-OUTPUT_LINES:])

    def fate(self, seconds: float = 0.0) -> str:
        """How it ended, as text; "" if it still runs after `seconds`."""
        if not self._ended.wait(seconds):
            return ""
        return f"mpirun {exit_text(self.process.returncode)}"

    def end(self) -> None:
        """Send TERM, and KILL after END_SECONDS; return when it has ended."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)
            if self._ended.wait(END_SECONDS):
                return


def sweep(token: str) -> None:
    """KILL all processes on this machine with `token` in their environment: an mpirun, its ssh, and local bridges."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if token.encode() in (folder / "environ").read_bytes():
                os.kill(int(folder.name), signal.SIGKILL)


def complaint(mpirun: Mpirun) -> str:
    """The error message for an mpirun that ended too early: what it printed, and a fix if one is known."""
    output = mpirun.output
    fix = f"\n{ROOT_FIX}" if ROOT.search(output) else ""
    return f"{mpirun.fate()} and printed" + (f"\n{output}" if output else " nothing") + fix
