"""The limits of this machine: time of memcpy, in-place float32 sum and TCP over loopback for a given number of bytes.

`python benchmarks/machine.py [--megabytes 102]` prints them. Each uses one thread.
"""

import argparse
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

REPEATS = 7
CHUNK = 4 << 20  # bytes; the largest slice of the parameter server


def describe() -> dict[str, object]:
    """Processor, usable cores, memory in bytes and kernel of this machine."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return {
        "processor": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
    }


def median_seconds(action: Callable[[], object]) -> float:
    """Median seconds of an action, after one call to warm up."""
    action()
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def measure(size: int) -> dict[str, float]:
    """Seconds for `size` bytes: memcpy, sum in place (target += source) and a one-way TCP stream over loopback."""
    memcpy = memcpy_seconds(size)
    target, source = np.ones(size // 4, np.float32), np.ones(size // 4, np.float32)
    return {
        "memcpy": memcpy,
        "sum_in_place": median_seconds(lambda: np.add(target, source, out=target)),
        "tcp_one_way": loopback_seconds(source),
    }


def memcpy_seconds(size: int) -> float:
    """Median seconds to copy `size` bytes."""
    target, source = np.ones(size // 4, np.float32), np.ones(size // 4, np.float32)
    return median_seconds(lambda: np.copyto(target, source))


def loopback_seconds(source: np.ndarray) -> float:
    """Median seconds to send the array to another process, which receives it into allocated memory."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        command = [sys.executable, __file__, "--receive", str(listener.getsockname()[1]), str(source.nbytes)]
        with subprocess.Popen(command):
            connection, _ = listener.accept()
            with connection:
                return median_seconds(lambda: send_and_wait(connection, source))


def send_and_wait(connection: socket.socket, source: np.ndarray) -> None:
    """Send all bytes and wait for the receiver's one-byte answer."""
    connection.sendall(source.data.cast("B"))
    connection.recv(1)


def receive(port: int, size: int) -> None:
    """The receiving process: receive `size` bytes into the same buffer and answer, until the connection ends."""
    target = memoryview(bytearray(size))
    with socket.create_connection(("127.0.0.1", port)) as connection:
        taken = 0
        while count := connection.recv_into(target[taken : taken + CHUNK]):
            taken += count
            if taken == size:
                connection.sendall(b"!")
                taken = 0


def main() -> None:
    """Print the three limits."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=102.2, help="bytes to move, in 10^6 (default %(default)s)")
    parser.add_argument("--receive", nargs=2, type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.receive:
        receive(*arguments.receive)
        return
    size = round(arguments.megabytes * 1e6)
    for name, seconds in measure(size).items():
        print(f"{name:14} {seconds * 1000:8.1f} ms  {size / seconds / 1e9:6.2f} GB/s")


if __name__ == "__main__":
    main()
