"""The GPUs of this host, as one long-lived nvidia-smi reports them, or where there is none, a process that reads the
files of AMD's driver.

It is a process of its own because a faulty driver can block its caller for ever. It is no process of the job: the agent
kills it at the job's end, and does not count it as left if it survives because its driver blocks. It ends when the
agent is gone, because then nobody reads its output. The output is not trusted: after WRONG_LINES lines that are no
report of a GPU the agent ends it, and the host counts as one without GPUs.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
import selectors
import subprocess
import sys
from typing import NamedTuple

from dmltrain_launch.agent.process import Process, process
from dmltrain_launch.agent.spawn import shielded

PROGRAM = "nvidia-smi"
LOOP_MS = 1000  # about the period over which the driver averages
ARGUMENTS = ("--query-gpu=index,utilization.gpu,memory.used", "--format=csv,noheader,nounits", f"--loop-ms={LOOP_MS}")
AMD = "/sys/bus/pci/drivers/amdgpu"  # has a folder for each GPU
# A program that prints about these GPUs what nvidia-smi prints about its own.
OF_AMD = """
import glob, sys, time

def read(path, unit):
    try:
        with open(path) as file:
            return "%.1f" % (int(file.read()) / unit)
    except (OSError, ValueError):
        return "[N/A]"

while True:
    for index, folder in enumerate(sorted(glob.glob(glob.escape(sys.argv[1]) + "/*:*"))):
        print(index, read(folder + "/gpu_busy_percent", 1), read(folder + "/mem_info_vram_used", 1 << 20), sep=",")
    sys.stdout.flush()
    time.sleep(int(sys.argv[2]) / 1000)
"""
VALUE = rb"\s*(\d{1,9}(?:\.\d{0,9})?|\[[^\],]{1,40}\])\s*"  # a number, or [N/A]
LINE = re.compile(rb"\s*(\d{1,5})\s*," + VALUE + rb"," + VALUE)
LINE_BYTES = 200
MOST_GPUS = 1024
WRONG_LINES = 8  # in a row; a few warnings do not end it
READ_BYTES = 1 << 14


class GpuUse(NamedTuple):
    """None: unknown, or there are no GPUs."""

    busy: float | None  # mean over GPUs and reports, 0 to 1
    memory: float | None  # MiB, of all GPUs


class Reports:
    """What the process has printed: `feed` it, `take` the use since the last call."""

    def __init__(self) -> None:
        self._rest, self._wrong = b"", 0
        self._busy: list[float] = []
        self._memory: dict[int, float] = {}  # MiB by GPU

    @property
    def trusted(self) -> bool:
        return self._wrong < WRONG_LINES and len(self._rest) <= LINE_BYTES

    def feed(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            match = LINE.fullmatch(line) if len(line) <= LINE_BYTES else None
            self._wrong = 0 if match else self._wrong + 1
            if not self.trusted:
                return
            if match:
                self._add(int(match[1]), match[2], match[3])

    def _add(self, index: int, busy: bytes, memory: bytes) -> None:
        if not busy.startswith(b"[") and float(busy) <= 100 and len(self._busy) < 64 * MOST_GPUS:
            self._busy.append(float(busy) / 100)
        if not memory.startswith(b"[") and (index in self._memory or len(self._memory) < MOST_GPUS):
            self._memory[index] = float(memory)

    def take(self) -> GpuUse:
        busy, memory = self._busy, self._memory
        self._busy, self._memory = [], {}
        return GpuUse(sum(busy) / len(busy) if busy else None, sum(memory.values()) if memory else None)


class Gpus:
    """Starts `program` if the host has it, else what reads the folder `amd`, and reads it through `selector`."""

    def __init__(self, selector: selectors.BaseSelector, program: str = PROGRAM, amd: str = AMD):
        self._selector, self._reports = selector, Reports()
        self._popen: subprocess.Popen[bytes] | None = None
        self._identity: Process | None = None
        of_amd = (
            [[sys.executable, "-I", "-S", "-c", OF_AMD, amd, str(LOOP_MS)]]
            if glob.glob(f"{glob.escape(amd)}/*:*")
            else []
        )
        for command in ([program, *ARGUMENTS], *of_amd):
            with contextlib.suppress(OSError), shielded():  # there is none
                self._popen = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,  # it gets no signal of a terminal
                )
                break
        if self._popen and self._popen.stdout:
            self._identity = process(self._popen.pid)
            os.set_blocking(self._popen.stdout.fileno(), False)
            selector.register(self._popen.stdout, selectors.EVENT_READ, self._read)

    @property
    def pid(self) -> int:
        """Of the process; 0 without one."""
        return self._popen.pid if self._popen else 0

    def is_mine(self, other: Process) -> bool:
        """Whether it is the process, and no later one with its pid."""
        mine = self._identity
        return mine is not None and (mine.pid, mine.start) == (other.pid, other.start)

    def take(self) -> GpuUse:
        """The use since the last call."""
        return self._reports.take()

    def _read(self) -> None:
        data = b""
        with contextlib.suppress(BlockingIOError, InterruptedError):
            data = os.read(self._popen.stdout.fileno(), READ_BYTES) if self._popen and self._popen.stdout else b""
            self._reports.feed(data)
            if not data or not self._reports.trusted:
                self.close()

    def close(self) -> None:
        """Kill it, without waiting: it may be blocked in the driver. The agent collects it with adopted orphans."""
        if self._popen and self._popen.stdout:
            self._selector.unregister(self._popen.stdout)
            self._popen.stdout.close()
            self._popen.stdout = None
            with contextlib.suppress(OSError):
                self._popen.kill()
