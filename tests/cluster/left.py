"""What a job leaves on a host, read from /proc cheaply: many trials look at once."""

from __future__ import annotations

import os
from pathlib import Path

from tests.cluster.processes import DEAD


def namespace(pid: int | None, kind: str = "pid") -> str:
    """Its own, which it has in common with the processes of its host. "" where it cannot be seen."""
    try:
        return os.readlink(f"/proc/{pid}/ns/{kind}")
    except OSError:
        return ""


def is_guest(pid: int) -> bool:
    """Whether it lives and is not of sshd."""
    try:
        name, _, rest = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(")")
        return not name.startswith("sshd") and rest.split()[0] not in DEAD
    except OSError:
        return False


def in_a_job(pid: int) -> bool:
    """Whether an agent has started it, or something that did."""
    try:
        return b"DMLTRAIN_JOB=" in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


def command_line(pid: int) -> str:
    """Its end, which tells more than its beginning."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[-100:]
    except OSError:
        return "(gone)"
