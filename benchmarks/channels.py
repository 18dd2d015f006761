"""How fast output streams from an agent to the launcher: the pipe of this machine, paramiko, the system's ssh.

    python benchmarks/channels.py [megabytes]

A real sshd on loopback; the agent, sshd and the launcher share this machine's cores. Prints a table in Markdown.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from launch import agent, channels
from launch.channels import Channel
from launch.channels.local import LocalChannel
from launch.job.host import Host
from tests.launch.ssh_connect import connector
from tests.launch.sshd import Home, Sshd

MEGABYTE = 10**6
SILENCE = 30.0  # s


def measure(channel: Channel, megabytes: int) -> tuple[float, float, float]:
    """(MB/s from a process to here, MB/s from here to the agent, CPU seconds of this process per GB received)."""
    heard = channels.frames(channel, SILENCE)
    mark = f"benchmark-{os.getpid()}"
    channels.send(channel, {"do": "job", "mark": mark, "host": "here", "key": "00", "grace": 1, "silence": SILENCE,
                            "log_folder": None})  # fmt: skip
    _until(heard, "ready")
    argv = ["head", "-c", str(megabytes * MEGABYTE), "/dev/zero"]
    task = {"task": 0, "argv": argv, "environment": {}, "workdir": "/"}
    began, cpu = time.perf_counter(), time.process_time()
    channels.send(channel, {"do": "start", "unset": [], "tasks": [task]})
    received = _until(heard, "exited")
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    assert received == megabytes * MEGABYTE
    up = min(megabytes, 100)
    began = time.perf_counter()
    for _ in range(up):
        channels.send(channel, {"do": "rest", "padding": "x" * MEGABYTE})
    channels.send(channel, {"do": "beat"})
    _until(heard, "beat")
    upwards = up / (time.perf_counter() - began)
    channels.send(channel, {"do": "stop", "grace": 1})
    _until(heard, "ended")
    channel.close()
    return megabytes / seconds, upwards, cpu / megabytes * 1000


def _until(heard: Iterator[tuple[int, int, bytes]], event: str) -> int:
    """Read up to an event; the bytes of output before it."""
    received = 0
    for kind, _, payload in heard:
        if kind == agent.OUTPUT:
            received += len(payload)
        elif json.loads(payload)["event"] == event:
            return received
    raise SystemExit(f"the agent ended before it said {event}")


def main() -> None:
    megabytes = int(sys.argv[1]) if len(sys.argv) > 1 else 700  # paramiko changes keys after 537
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "home").mkdir()
        home = Home(folder / "home")
        sshd = Sshd(folder / "sshd", home.authorized)
        try:
            home.know(sshd)
            print(f"{megabytes} MB over loopback, {os.cpu_count()} cores\n")
            print("| channel | connect, s | from the agent, MB/s | to the agent, MB/s | CPU of the launcher, s/GB |")
            print("| --- | --- | --- | --- | --- |")
            opens = {
                "local": lambda: LocalChannel(Host("here", "127.0.0.1", sys.executable), "benchmark"),
                "paramiko": lambda: connector("paramiko", home)(sshd.host()),
                "system ssh": lambda: connector("system", home)(sshd.host()),
            }
            for what, connect in opens.items():
                began = time.perf_counter()
                channel = connect()
                seconds = time.perf_counter() - began
                down, up, cpu = measure(channel, megabytes)
                print(f"| {what} | {seconds:.2f} | {down:.0f} | {up:.0f} | {cpu:.2f} |")
        finally:
            sshd.stop()


if __name__ == "__main__":
    main()
