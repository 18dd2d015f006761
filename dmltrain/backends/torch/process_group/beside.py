"""The scheduler and the servers of a job without a launcher of ours, such as torchrun's: they run beside its workers.

The first worker of all starts the scheduler, and the first one of each host a server. The workers agree through the
store of their group. Scheduler and servers end with the job: when all workers have left, or one is lost. When the
worker that has started them is gone, they have SECONDS to tell the others why.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store

from dmltrain.base import env
from dmltrain.base.env import Environment
from dmltrain.base.errors import UserError
from dmltrain.kvstore.transport import host, link

SECONDS = 10
PR_SET_PDEATHSIG = 1  # linux/prctl.h
PROGRAM = "import sys; sys.path[:] = filter(None, sys.path); "  # without the current folder, which -c begins with
PROGRAM += f"import signal; signal.signal(signal.SIGTERM, lambda *_: signal.alarm({SECONDS})); import dmltrain.torch"
LOCAL = "127.0.0.1"

_libc = ctypes.CDLL(None, use_errno=True)


def start(store: Store, rank: int, size: int) -> Environment:
    """Start what runs beside this worker. Returns its environment as a launcher of ours would have made it. All workers
    must call this. Raises UserError if other hosts cannot reach this one."""
    store = PrefixStore("dmltrain servers", store)
    own = {"identity": host.identity(), "address": _address(env.master())}
    store.set(f"worker {rank}", json.dumps(own))
    if rank == 0:
        workers = [json.loads(store.get(f"worker {number}")) for number in range(size)]
        store.set("job", json.dumps(_begin(workers)))
    job = json.loads(store.get("job"))
    key = _key(job["key"])
    address = own["address"] if len(job["first"]) > 1 else LOCAL
    variables = {**job["variables"], "DMLC_NODE_HOST": address}
    if rank in job["first"]:
        number = str(job["first"].index(rank))
        _run({**variables, "DMLC_ROLE": "server", "DMLC_SERVER_ID": number}, key)
    worker = env.inherited(**variables, DMLC_ROLE="worker", DMLC_WORKER_ID=str(rank))
    return replace(env.read(worker), key=key)


def _begin(workers: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """Start the scheduler. Returns what all workers must know: `first`, the first one of each host, and so on."""
    first = [ranks[0] for ranks in host.of_workers([worker["identity"] for worker in workers])]
    address = workers[0]["address"] if len(first) > 1 else LOCAL
    if len(first) > 1 and address.startswith("127."):
        raise UserError(
            f"MASTER_ADDR={env.master()} is {address} on its own host, where other hosts cannot reach it: set it to an "
            "address of that host on the training network"
        )
    key = "" if env.key() else secrets.token_hex(16)
    with link.listen(address) as listening:
        variables = {
            "DMLC_NUM_WORKER": str(len(workers)),
            "DMLC_NUM_SERVER": str(len(first)),
            "DMLC_PS_ROOT_URI": address,
            "DMLC_PS_ROOT_PORT": str(listening.getsockname()[1]),
        }
        descriptor = listening.fileno()
        own = {"DMLC_ROLE": "scheduler", "DMLC_NODE_HOST": address, "DMLTRAIN_LISTEN_FD": str(descriptor)}
        _run({**variables, **own}, _key(key), descriptor)
    return {"first": first, "variables": variables, "key": key}


def _key(told: str) -> bytes:
    """The job's secret. `told`: by worker 0, through the store; "": it has one of its user."""
    own = env.key()
    if bool(own) == bool(told):
        raise UserError(
            f"DMLTRAIN_KEY_FILE is {'' if own else 'not '}set here, but {'not ' if own else ''}for worker 0: set it "
            "for all workers, or for none"
        )
    return own or told.encode()


def _run(variables: Mapping[str, str], key: bytes, *inherited: int) -> None:
    """Start a process with these variables. At its end this one waits for it: other workers may still need it."""
    parent = os.getpid()

    def follow() -> None:
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it has ended before, so there is no signal (man 2 prctl)
            os._exit(1)

    secret = os.memfd_create("key")
    try:
        os.write(secret, key)
        here = str(Path(__file__).parents[4])  # of a checkout that is in this program's sys.path only
        path = os.pathsep.join([here, *filter(None, [env.inherited().get("PYTHONPATH", "")])])
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            stdin=subprocess.DEVNULL,
            env=env.inherited(**variables, DMLTRAIN_KEY_FILE=f"/proc/self/fd/{secret}", PYTHONPATH=path),
            pass_fds=(secret, *inherited),
            start_new_session=True,  # Ctrl-C is for the workers
            # The signal comes at the end of the thread that has started the process.
            preexec_fn=follow if threading.current_thread() is threading.main_thread() else None,
        )
    finally:
        os.close(secret)
    atexit.register(process.wait)  # after the store, which is registered later, has left the job


def _address(master: str) -> str:
    """This host's address on its way to the host of worker 0."""
    try:
        family, *_, place = socket.getaddrinfo(master or LOCAL, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)  # which sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return LOCAL
