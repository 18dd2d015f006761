"""Rate at which output streams from an agent to the launcher, through a local pipe, paramiko and the system's ssh.

    python benchmarks/channels.py [megabytes]

It runs a real sshd on loopback; agent, sshd and launcher share this machine's cores. Prints a table in Markdown.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from dmltrain_launch import channels
from dmltrain_launch.agent import commands
from dmltrain_launch.agent.events import Alive, Ended, Event, Exited, Ready
from dmltrain_launch.agent.protocol import OUTPUT, decode_event, encode_command
from dmltrain_launch.channels import Channel
from dmltrain_launch.channels.process import LocalChannel
from dmltrain_launch.job.host import Host
from tests.launch.ssh_connect import connector
from tests.launch.sshd import Home, Sshd

MEGABYTE = 10**6
SILENCE = 30.0  # s


def measure(channel: Channel, megabytes: int) -> tuple[float, float, float]:
    """(MB/s from a process to the launcher, MB/s from the launcher to the agent, the launcher's CPU seconds per GB
    received)."""
    received_frames = channels.frames(channel, SILENCE)
    mark = f"benchmark-{os.getpid()}"
    channel.write(encode_command(commands.JobCommand(mark, "here", grace=1, silence=SILENCE, key="00")))
    _until(received_frames, Ready)
    argv = ["head", "-c", str(megabytes * MEGABYTE), "/dev/zero"]
    task = commands.Spawn(0, tuple(argv), {}, "/")
    began, cpu = time.perf_counter(), time.process_time()
    channel.write(encode_command(commands.Start((), (task,))))
    received = _until(received_frames, Exited)
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    assert received == megabytes * MEGABYTE
    up = min(megabytes, 100)
    began = time.perf_counter()
    for _ in range(up):
        channel.write(b'{"do": "beat"}'.ljust(MEGABYTE) + b"\n")  # JSON ignores the white space
        _until(received_frames, Alive)
    upwards = up / (time.perf_counter() - began)
    channel.write(encode_command(commands.Stop(1)))
    _until(received_frames, Ended)
    channel.close()
    return megabytes / seconds, upwards, cpu / megabytes * 1000


def _until(frames: Iterator[tuple[int, int, bytes]], event: type[Event]) -> int:
    """Read up to an event; returns the bytes of output before it."""
    received = 0
    for kind, _, payload in frames:
        if kind == OUTPUT:
            received += len(payload)
        elif isinstance(decode_event(payload, "here"), event):
            return received
    raise SystemExit(f"the agent ended before it sent {event.__name__}")


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
