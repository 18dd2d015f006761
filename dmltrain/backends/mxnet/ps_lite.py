"""How a process joins ps-lite, MXNet's parameter server, in addition to dmltrain's scheduler.

dmltrain's scheduler listens on the job's DMLC_PS_ROOT_PORT. It finds another port for ps-lite's scheduler, and tells
all processes when the job starts. ps-lite itself is unchanged: it would wait forever for a lost process. But dmltrain
detects every loss by its own connections and heartbeats, and then ends all processes."""

from __future__ import annotations

import ctypes
import socket
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from dmltrain.base.env import Environment
from dmltrain.base.errors import JobLost, UserError

PORT = "mxnet_port"  # the fact by which the scheduler announces ps-lite's port
EXIT_SECONDS = 0.25  # a process of a lost job has this long to end: its main thread mostly waits inside ps-lite


def reserve(host: str) -> socket.socket:
    """A socket bound to a free port of `host`; no other socket can use the port until `share`."""
    reserved = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        reserved.bind((host, 0))
    except OSError as error:
        reserved.close()
        raise UserError(
            f"the scheduler cannot listen on {host}: {error.strerror}; set DMLC_PS_ROOT_URI to an address of this host"
        ) from error
    return reserved


def share(reserved: socket.socket) -> None:
    """Let ps-lite bind the port, too: it also sets SO_REUSEADDR, and `reserved` does not listen."""
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)


def check(environment: Environment) -> None:
    """Raise UserError if the job wants what ps-lite does not have: IPv6, or protected traffic."""
    if ":" in environment.root_host:
        raise UserError(
            f"MXNet's kvstores support IPv4 only, but the scheduler's address is {environment.root_host}: choose an "
            "IPv4 network (--subnet or --interface of dmltrain-launch), or --backend torch"
        )
    if environment.wire != "plain":
        raise UserError(
            f"--wire {environment.wire} (DMLTRAIN_WIRE): ps-lite, MXNet's parameter server, can neither authenticate "
            "nor encrypt what it sends; start the job without --wire, or use --backend torch"
        )


def join(mx: ModuleType, environment: Environment, facts: Mapping[str, Any], kind: str) -> Any:
    """MXNet's kvstore for this process and its role. Waits until all processes of the job have joined ps-lite."""
    port = facts.get(PORT)
    if not isinstance(port, int):
        raise JobLost("the scheduler of this job does not run MXNet: start all processes with the same --backend")
    values = {
        "DMLC_ROLE": environment.role,
        "DMLC_NUM_WORKER": environment.num_workers,
        "DMLC_NUM_SERVER": environment.num_servers,
        "DMLC_PS_ROOT_URI": environment.root_host,
        "DMLC_PS_ROOT_PORT": port,
        "DMLC_NODE_HOST": environment.node_host,
    }
    count = len(values)
    names = (ctypes.c_char_p * count)(*(name.encode() for name in values))
    texts = (ctypes.c_char_p * count)(*(str(value).encode() for value in values.values()))
    mx.base.check_call(mx.base._LIB.MXInitPSEnv(ctypes.c_uint(count), names, texts))
    return mx.kv.create(kind)
