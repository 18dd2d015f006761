"""The scheduler's and the servers' processes of an MXNet job: ps-lite's loop with a controller that takes JSON only.

Two things run in each process. On the main thread MXNet's own server: it adds the workers' pushes and, once it was told
which optimizer, calls back here for each step. On a thread of its own dmltrain's scheduler or server: it knows who
lives, tells everybody when the job is lost (and ends this process then, though its main thread waits inside ps-lite),
adds up the workers' small numbers (accuracy, batch-norm statistics), and reads and writes optimizer states.

What a server keeps for a checkpoint is npz: "RANK/KEY/FIELD", RANK being the server's in ps-lite. ps-lite gives ranks
by address and port, so they change from run to run; a state is loaded by rank, whichever process has it now.
"""

from __future__ import annotations

import ctypes
import io
import os
import sys
import threading
import traceback
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np

from dmltrain.arrays import Array
from dmltrain.backends.mxnet import compat as mxnet_compat
from dmltrain.backends.mxnet import optimizer as mxnet_optimizer
from dmltrain.backends.mxnet import ps_lite as mxnet_ps
from dmltrain.backends.mxnet.server import command as mxnet_command
from dmltrain.env import Environment
from dmltrain.errors import JobLost
from dmltrain.kvstore.log import log
from dmltrain.kvstore.scheduler.process import SchedulerProcess
from dmltrain.kvstore.server.declared import Rejected
from dmltrain.kvstore.server.process import ServerProcess

MAX_STATE = 1 << 34  # bytes of an optimizer state that is loaded


def serve(environment: Environment) -> str:
    """Be the scheduler, or one of the servers, until the job ends. Returns why it was lost, or ''."""
    mxnet_ps.check(environment)
    mx = mxnet_compat.load()  # takes seconds, in which this process sends no heartbeat
    if environment.role == "scheduler":
        facts: dict[str, Any] = {}
        process = SchedulerProcess(environment, facts)  # takes its own port first
        with mxnet_ps.reserve(environment.root_host) as reserved:
            facts[mxnet_ps.PORT] = reserved.getsockname()[1]
            side = _beside(environment, process.run)
            mxnet_ps.share(reserved)
            _run(mx, mxnet_ps.join(mx, environment, facts, "dist"), lambda *_: None)
    else:
        server = Server(mx, environment)
        side = _beside(environment, server.run)
        server.run_mxnet()
    side.join()
    return ""


def _beside(environment: Environment, run: Callable[[], str]) -> threading.Thread:
    """Run dmltrain's part on a thread; a lost job ends the process from there."""

    def serve() -> None:
        try:
            reason = run()
        except BaseException:  # a defect of this program: without this part nobody would notice a lost job
            reason = traceback.format_exc()
        if reason:
            sys.stderr.write(f"dmltrain: {environment.role} {environment.index}: {reason}\n")
            sys.stderr.flush()
            os._exit(JobLost.exit_code)

    thread = threading.Thread(target=serve, name="dmltrain", daemon=True)
    thread.start()
    return thread


def _run(mx: Any, store: Any, controller: Any) -> None:
    """MXNet's loop; `controller(head, body, None)` gets the workers' commands."""
    kind = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
    mx.base.check_call(mx.base._LIB.MXKVStoreRunServer(store.handle, kind(controller), None))


class Server(ServerProcess):
    """One server. MXNet's thread and dmltrain's meet in `_updater`, under `_guard`."""

    def __init__(self, mx: Any, environment: Environment) -> None:
        super().__init__(environment, make_step=None, exit_seconds=mxnet_ps.EXIT_SECONDS)
        self._mx = mx
        self._guard = threading.Lock()
        self._updater: mxnet_optimizer.Updater | None = None
        self._waiting: dict[str, Array] = {}  # a state that was loaded before the optimizer came
        self._store: Any = None

    def run_mxnet(self) -> None:
        """MXNet's part, until the workers stop it."""
        facts = self._control.wait_for_start().facts
        self._store = mxnet_ps.join(self._mx, self._environment, facts, "dist")
        _run(self._mx, self._store, self._command)

    # -- called by MXNet ------------------------------------------------------------------------------------------

    def _command(self, head: int, body: bytes, _: Any) -> None:
        try:
            kind, value = mxnet_command.decode(head, body)
            if kind == "optimizer":
                self._set_optimizer(value)
            elif self._updater is None:
                raise mxnet_command.Refused("a learning rate before the optimizer")
            else:
                self._updater.set_learning_rate(value)
        except (mxnet_command.Refused, ValueError) as error:
            self._abort(f"refused {error}")
        except Exception as error:  # MXNet would only print it, and go on
            self._abort(f"{type(error).__name__}: {error}")

    def _set_optimizer(self, spec: dict[str, Any]) -> None:
        with self._guard:
            self._updater = mxnet_optimizer.Updater(spec)
            self._updater.load(self._waiting)
        self._store._set_updater(self._update)
        rank = self._store.rank  # asked any earlier, before ps-lite runs, it is a segmentation fault
        log(f"server {self._environment.index}, rank {rank} of MXNet's servers, steps with {spec['name']}")

    def _update(self, key: int, gradient: Any, weight: Any) -> None:
        try:
            with self._guard:
                assert self._updater is not None  # MXNet got `_update` from _set_optimizer, after the updater was made
                self._updater(key, gradient, weight)
        except Exception as error:  # MXNet would go on with the old weights
            self._abort(f"the optimizer's step of key {key} failed: {error}")

    def _abort(self, reason: str) -> None:
        self._control.abort(reason)

    # -- called by dmltrain's thread ------------------------------------------------------------------------------

    def pack_state(self) -> bytes:
        stream = io.BytesIO()
        with self._guard:
            state = self._updater.state() if self._updater else {}
        np.savez(stream, **{f"{self._store.rank}/{name}": array for name, array in state.items()})
        return stream.getvalue()

    def state_limit(self) -> int:
        return MAX_STATE

    def unpack_state(self, data: bytearray) -> None:
        """Takes this server's part of a state that may hold those of all."""
        own = f"{self._store.rank}/"
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as archive:
                state = {name.removeprefix(own): archive[name] for name in archive.files if name.startswith(own)}
            with self._guard:
                self._waiting = state
                if self._updater:
                    self._updater.load(state)
        except (ValueError, OSError, EOFError, zipfile.BadZipFile, KeyError) as error:
            raise Rejected(f"the optimizer state cannot be read: {error}") from error
