"""Facts about this host, and whether the job's program would run here.

The request is {"workdir", "argv", "script": the Python file or "", "python": its interpreter ("": this one),
"needs": [modules], "environment": {added variables}, "unset": [removed variables], "packages": [names]}.
All but `argv` may be missing. A fact that was not requested is None in the answer.

The answer has `facts(request)`, which is fast, and the output of two child processes: nvidia-smi, and the interpreter
that will run the script. `Probe` does not block and has no threads, because the agent's loop reaps all children of this
process: call `poll()` when `fileno()` is readable, and at `deadline`.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import platform
import re
import resource
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from dmltrain_launch.agent.host import cores, inspection
from dmltrain_launch.agent.host.interface import interfaces
from dmltrain_launch.agent.spawn import environment_here

PACKAGES = ("dmltrain", "torch", "mxnet", "numpy")
INSPECTION_SECONDS = 20.0  # the first start of a Python on a network file system takes seconds
GPU_SECONDS = 3.0  # nvidia-smi hangs if the driver is faulty
MIB = 1 << 20
READ_BYTES = 1 << 16
TAIL_CHARACTERS = 300  # of a failed child's output, for the error message


def facts(request: dict[str, Any]) -> dict[str, Any]:
    """The facts that need no child process, in a few milliseconds; sizes in MiB, times in seconds."""
    workdir = request.get("workdir")
    return {
        "hostname": socket.gethostname(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "cores": cores.usable(cores.report()),
        "memory": memory(),
        "interfaces": interfaces(),
        "open_files": list(resource.getrlimit(resource.RLIMIT_NOFILE)),  # soft, hard; -1 is no limit
        "disk": {path: free_space(path) for path in [workdir, "/tmp", "/dev/shm"] if path},
        "workdir": state_of_folder(workdir) if workdir else None,
        "program": state_of_program(request) if request.get("argv") else None,
        "script": state_of_script(request) if request.get("script") else None,
        "time": time.time(),
    }


def memory() -> int | None:
    with contextlib.suppress(OSError), open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemTotal:"):
                return int(line.split()[1]) // 1024  # from KiB
    return None


def free_space(path: str) -> int | None:
    """Free MiB for this user at `path`, or where it would be created; None if unknown."""
    while not os.path.isdir(path) and path not in ("", "/"):
        path = os.path.dirname(path)
    try:
        file_system = os.statvfs(path or "/")
    except OSError:
        return None
    return file_system.f_bavail * file_system.f_frsize // MIB


def state_of_folder(path: str) -> dict[str, Any]:
    return {"path": path, "exists": os.path.isdir(path), "writable": os.access(path, os.W_OK | os.X_OK)}


def state_of_script(request: dict[str, Any]) -> dict[str, Any]:
    path = os.path.join(request.get("workdir") or "/", request["script"])
    return {"path": request["script"], "exists": os.path.isfile(path), "readable": os.access(path, os.R_OK)}


def state_of_program(request: dict[str, Any]) -> dict[str, Any]:
    """{"name", "path" ("": not found), "folder", "executable"} of the program that would be started."""
    name = python_of(request) if request.get("script") else request["argv"][0]
    paths = [path for path in candidates(name, request) if os.path.exists(path)]
    executables = [path for path in paths if os.path.isfile(path) and os.access(path, os.X_OK)]
    path = (executables or paths or [""])[0]
    return {"name": name, "path": path, "folder": os.path.isdir(path), "executable": bool(executables)}


def candidates(name: str, request: dict[str, Any]) -> list[str]:
    """The paths at which a program of this name is searched for, in order."""
    workdir = request.get("workdir") or "/"
    if "/" in name:
        return [os.path.join(workdir, name)]
    return [os.path.join(workdir, folder, name) for folder in os.get_exec_path(environment(request))]


def environment(request: dict[str, Any]) -> dict[str, str]:
    """The environment of the job's processes."""
    return dict(environment_here(request.get("unset") or []), **(request.get("environment") or {}))


def python_of(request: dict[str, Any]) -> str:
    return request.get("python") or sys.executable


def gpus_of_listing(text: str) -> list[dict[str, Any]]:
    """The rows of `nvidia-smi -L`: [{"index", "name", "uuid"}]."""
    rows = re.findall(r"^GPU (\d+): (.*?) \(UUID: ([^)]+)\)", text, re.MULTILINE)
    return [{"index": int(index), "name": name, "uuid": uuid} for index, name, uuid in rows]


def gpus_of_driver(folder: str = "/proc/driver/nvidia/gpus") -> list[dict[str, Any]]:
    """The same from the driver's files, in the order of the PCI bus, as nvidia-smi lists them."""
    rows = []
    for index, path in enumerate(sorted(glob.glob(os.path.join(glob.escape(folder), "*", "information")))):
        with contextlib.suppress(OSError), open(path, errors="replace") as file:
            values = dict(re.findall(r"^(.+?):[ \t]*(.*)$", file.read(), re.MULTILINE))
            rows.append({"index": index, "name": values.get("Model", ""), "uuid": values.get("GPU UUID", "")})
    return rows


def gpus_of_amd(folder: str = "/sys/class/kfd/kfd/topology/nodes") -> list[dict[str, Any]]:
    """The same from the files of AMD's driver: the nodes that compute, in the order in which its runtime counts."""
    rows: list[dict[str, Any]] = []
    for path in sorted(glob.glob(os.path.join(glob.escape(folder), "*")), key=lambda path: (len(path), path)):
        with contextlib.suppress(OSError), open(os.path.join(path, "properties")) as file:
            values = dict(re.findall(r"^(\w+) (\d{1,20})$", file.read(), re.MULTILINE))
            if int(values.get("simd_count", 0)):
                with open(os.path.join(path, "name"), errors="replace") as name:
                    identity = f"GPU-{int(values.get('unique_id', 0)):016x}"
                    rows.append({"index": len(rows), "name": f"AMD {name.read(100).strip()}", "uuid": identity})
    return rows


class Output:
    """The output of a child process up to its end or `deadline`. `error` says why there is none."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        command: list[str],
        deadline: float,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
    ):
        self.selector, self.deadline = selector, deadline
        self.printed, self.error = bytearray(), ""
        self.child: subprocess.Popen[bytes] | None = None
        try:
            self.child = child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=cwd,
                env=env,
            )
        except (OSError, ValueError) as error:
            missing = isinstance(error, OSError) and error.errno == errno.ENOENT
            self.error = f"{command[0]} cannot be started: {'not found' if missing else error}"
            return
        assert child.stdout
        selector.register(child.stdout, selectors.EVENT_READ, self)

    @property
    def over(self) -> bool:
        return self.child is None

    def read(self) -> None:
        """Read what has arrived; for a child whose output is readable."""
        assert self.child and self.child.stdout
        data = os.read(self.child.stdout.fileno(), READ_BYTES)
        self.printed += data
        if not data:
            self.close()

    def give_up(self, why: str) -> None:
        """Kill the child without waiting: SIGKILL does not end a child that hangs in a driver."""
        if self.child is None:
            return
        self.error = why
        if self.child.poll() is None:
            with contextlib.suppress(OSError):
                os.killpg(self.child.pid, signal.SIGKILL)
        self.close()

    def close(self) -> None:
        assert self.child and self.child.stdout
        self.selector.unregister(self.child.stdout)
        self.child.stdout.close()
        self.child.poll()
        self.child = None


class Probe:
    """Starts at once. `poll()` returns None until it returns the answer, which has, in addition to `facts`:

    "gpus": [{"index", "name", "uuid"}]; "seconds" that the probe took; and "inspection": {"executable", "version",
    "packages": {name: version or None}, "missing": [needed, not found], "local": [needed, found beside the script]},
    or {"error": text}.
    """

    def __init__(
        self,
        request: dict[str, Any],
        listing: tuple[str, ...] = ("nvidia-smi", "-L"),
        gpu_seconds: float = GPU_SECONDS,
        inspection_seconds: float = INSPECTION_SECONDS,
    ):
        self.request, self.began = request, time.monotonic()
        self.selector = selectors.DefaultSelector()
        workdir = request.get("workdir") or "/"
        inspected = {**request, "packages": request.get("packages") or PACKAGES}
        self.listing = Output(self.selector, list(listing), self.began + gpu_seconds)
        self.inspection = Output(
            self.selector,
            inspection.command(python_of(request), inspected),
            self.began + inspection_seconds,
            cwd=workdir if os.path.isdir(workdir) else "/",
            env=environment(request),
        )
        self.facts = facts(request)  # while the children work

    def fileno(self) -> int:
        """Readable when `poll` has something to do."""
        return self.selector.fileno()

    @property
    def deadline(self) -> float:
        """When, in seconds of time.monotonic(), to call `poll` without an event."""
        return min([output.deadline for output in (self.listing, self.inspection) if not output.over] or [self.began])

    def poll(self) -> dict[str, Any] | None:
        """The answer; None if it is not complete yet."""
        for key, _ in self.selector.select(0):
            key.data.read()
        for output in (self.listing, self.inspection):
            if time.monotonic() >= output.deadline:
                output.give_up("no answer in time")
        if not (self.listing.over and self.inspection.over):
            return None
        listed = gpus_of_listing(bytes(self.listing.printed).decode(errors="replace"))
        gpus = listed or gpus_of_driver() or gpus_of_amd()
        took = time.monotonic() - self.began
        return dict(self.facts, gpus=gpus, inspection=self._inspected(), seconds=took, time=time.time())

    def _inspected(self) -> dict[str, Any]:
        printed = bytes(self.inspection.printed)
        tail = printed.decode(errors="replace").strip()[-TAIL_CHARACTERS:]
        error = self.inspection.error or f"{python_of(self.request)} did not answer: {tail or 'it printed nothing'}"
        return inspection.answer(printed) or {"error": error}

    def close(self) -> None:
        """End the probe, also before the answer."""
        for output in (self.listing, self.inspection):
            output.give_up("cancelled")
        self.selector.close()
