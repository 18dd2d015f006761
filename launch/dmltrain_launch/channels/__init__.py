"""Channels: the byte streams to agents. How an agent is started over a channel, and how its frames are read.

A channel is an object with
    write(data)        send all data to the agent; OSError if the agent is gone; any thread may call it
    read(timeout)      some bytes from the agent, b"" at its end; TimeoutError after `timeout` seconds without data
    close() -> str     end the agent if it still runs; returns how it ended, as text
    ended              whether the host itself has reported the agent's end, and so can be reached; known after close()
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from dmltrain.base import capacity, json_text, schema
from dmltrain_launch import agent
from dmltrain_launch.agent.protocol import GREETING, HEADER, HELLO, VERSION, check_frame
from dmltrain_launch.job.host import Host

# Part of the agent's text, so Python 3.8. A module is compiled when it is first imported: few jobs need all of them.
LOAD = """
import sys
from importlib.machinery import ModuleSpec
class Sources:
    def __init__(self, texts, packages):
        self.texts, self.packages = texts, packages
    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self, is_package=name in self.packages) if name in self.texts else None
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        exec(compile(self.texts[module.__name__], module.__name__, "exec"), module.__dict__)
"""
SHARED = (capacity, schema, json_text)  # modules of dmltrain that the agent imports
TOO_OLD = "too old a Python:"  # printed by a Python before 3.8, with its version
READY = b"\0dmltrain-python\n"  # printed by the Python that waits for the agent's text
TEXT_SECONDS = 10  # without a byte of the agent's text, which the launcher sends when it reads READY
NOISE_BYTES = 1 << 16  # a login script may print so much before the agent's greeting


class Readable(Protocol):
    def read(self, timeout: float) -> bytes: ...


class Channel(Readable, Protocol):
    def write(self, data: bytes) -> None: ...

    def close(self) -> str: ...

    @property
    def ended(self) -> bool: ...


class ChannelError(Exception):
    """The data on a channel does not come from an agent."""


def agent_text() -> bytes:
    """Python source that, when executed, runs the agent: all modules of the agent, and LOAD, which imports them."""
    folder = Path(agent.__file__).parent
    packages = ["dmltrain_launch", "dmltrain", "dmltrain.base"]
    sources = dict.fromkeys(packages, "")
    sources.update((module.__name__, Path(str(module.__file__)).read_text()) for module in SHARED)
    for path in sorted(folder.rglob("*.py")):
        name = ".".join(("dmltrain_launch.agent", *path.relative_to(folder).with_suffix("").parts))
        if path.stem == "__init__":
            name = name.removesuffix(".__init__")
            packages.append(name)
        sources[name] = path.read_text()
    find = f"sys.meta_path.insert(0, Sources({sources!r}, {packages!r}))"
    return f"{LOAD}\n{find}\nfrom dmltrain_launch.agent.serve import main\nmain()\n".encode()


def agent_command(python: str) -> tuple[list[str], bytes]:
    """The command that becomes the agent, and the agent's text, which it first reads from standard input.

    It prints READY before it reads, and ends when nothing comes for TEXT_SECONDS: the launcher may be cut off by then.
    The text begins with an empty line, which does nothing if another program, such as a shell, reads it.
    """
    text = b"\n" + agent_text()
    load = f"import os,select,sys;sys.version_info<(3,8)and sys.exit('{TOO_OLD} %d.%d'%sys.version_info[:2]);s=b'';"
    load += f"os.write(1,{READY!r});"
    read = f"select.select([0],[],[],{TEXT_SECONDS})[0]and os.read(0,{len(text)}-len(s))or sys.exit(1)"
    load += f"exec('while len(s)<{len(text)}:s+={read}');exec(s)"
    return [python, "-I", "-S", "-X", "utf8", "-c", load, "dmltrain-agent"], text


def remote_command(host: Host, mark: str) -> tuple[str, bytes]:
    """The same for any shell on `host`. Without python=, the path of this Python is used if it exists, else python3.

    DMLTRAIN_AGENT=`mark` is in the agent's environment, so that another agent of the job can find and end it.
    """
    command, text = agent_command("")
    fallback = "" if host.python else 'command -v "$p" >/dev/null 2>&1 || p=python3; '
    script = f"p={shlex.quote(host.python or sys.executable)}; {fallback}"
    script += f'DMLTRAIN_AGENT={shlex.quote(mark)} exec "$p" {shlex.join(command[1:])}'
    return f"exec /bin/sh -c {shlex.quote(script)}", text


def frames(channel: Readable, silence: float) -> Iterator[tuple[int, int, bytes]]:
    """(kind, task, payload) of each frame until the end; TimeoutError after `silence` seconds without data,
    ProtocolError for a frame that is too long, before it is read."""
    data = _hello(channel, silence)
    while True:
        start = 0
        while len(data) - start >= HEADER.size:
            kind, task, length = HEADER.unpack_from(data, start)
            check_frame(kind, length)
            end = start + HEADER.size + length
            if len(data) < end:
                break
            yield kind, task, bytes(data[start + HEADER.size : end])
            start = end
        del data[:start]
        more = channel.read(silence)
        if not more:
            return
        data += more


def _hello(channel: Readable, silence: float) -> bytearray:
    """Skip to the agent's greeting and check its version. Returns the data after it."""
    data = bytearray()
    while (start := data.find(GREETING)) < 0 or (end := data.find(b"\n", start)) < 0:
        more = channel.read(silence)
        if not more or len(data) > NOISE_BYTES:
            output = data.replace(READY, b"").decode(errors="replace").strip()[-500:]
            raise ChannelError("the agent did not start" + (f"; the output was: {output}" if output else ""))
        data += more
    if data[start : end + 1] != HELLO:
        version = data[start + len(GREETING) : end].decode(errors="replace")
        raise ChannelError(f"the agent has version {version} of the protocol, expected {VERSION}")
    del data[: end + 1]
    return data
