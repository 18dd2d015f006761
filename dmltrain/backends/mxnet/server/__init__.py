"""The scheduler and the servers of an MXNet job: ps-lite's loop with a controller that accepts JSON only.

Each process runs two parts. On the main thread, MXNet's server adds the workers' pushes and, once it has an optimizer,
calls this module for each step. On another thread, dmltrain's scheduler or server detects lost processes and reports a
lost job to all processes (it then ends this process, even though the main thread waits inside ps-lite). It also sums
small arrays of the workers (accuracy, batch-norm statistics), and reads and writes optimizer states.

A server's state in a checkpoint is an npz with names "RANK/KEY/FIELD"; RANK is the server's in ps-lite. ps-lite assigns
ranks by address and port, so a process's rank may change from run to run; a state is loaded by rank.
"""

from __future__ import annotations

import ctypes
import io
import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np

from dmltrain.backends.mxnet import compat as mxnet_compat
from dmltrain.backends.mxnet import optimizer as mxnet_optimizer
from dmltrain.backends.mxnet import ps_lite as mxnet_ps
from dmltrain.backends.mxnet.server import command as mxnet_command
from dmltrain.base import npz
from dmltrain.base.arrays import Array
from dmltrain.base.env import Environment
from dmltrain.base.errors import JobLost
from dmltrain.kvstore.log import log
from dmltrain.kvstore.scheduler.process import SchedulerProcess
from dmltrain.kvstore.server.declared import Rejected
from dmltrain.kvstore.server.process import ServerProcess
from dmltrain.kvstore.transport.wire import MAX_STATE


def serve(environment: Environment) -> str:
    """Run as the scheduler or as a server until the job ends. Returns why the job was lost, or ''."""
    mxnet_ps.check(environment)
    mx = mxnet_compat.load()  # takes seconds, in which this process sends no heartbeat
    if environment.role == "scheduler":
        facts: dict[str, Any] = {}
        process = SchedulerProcess(environment, facts)  # binds its own port first
        with mxnet_ps.reserve(environment.root_host) as reserved:
            facts[mxnet_ps.PORT] = reserved.getsockname()[1]
            side = _start(environment, process.run)
            mxnet_ps.share(reserved)
            _run(mx, mxnet_ps.join(mx, environment, facts, "dist"), lambda *_: None)
    else:
        server = Server(mx, environment)
        side = _start(environment, server.run)
        server.run_mxnet()
    side.join()
    return ""


def _start(environment: Environment, run: Callable[[], str]) -> threading.Thread:
    """Run dmltrain's part on a thread, which ends the process if the job is lost."""

    def serve() -> None:
        try:
            reason = run()
        except BaseException:  # a defect: without this part this process would not notice a lost job
            reason = traceback.format_exc()
        if reason:
            sys.stderr.write(f"dmltrain: {environment.role} {environment.index}: {reason}\n")
            sys.stderr.flush()
            os._exit(JobLost.exit_code)

    thread = threading.Thread(target=serve, name="dmltrain", daemon=True)
    thread.start()
    return thread


def _run(mx: Any, store: Any, controller: Any) -> None:
    """Run MXNet's loop, which calls `controller(head, body, None)` for the workers' commands."""
    kind = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
    mx.base.check_call(mx.base._LIB.MXKVStoreRunServer(store.handle, kind(controller), None))


class Server(ServerProcess):
    """One server. MXNet's thread and dmltrain's share `_updater` under the lock `_guard`."""

    def __init__(self, mx: Any, environment: Environment) -> None:
        super().__init__(environment, make_step=None, exit_seconds=mxnet_ps.EXIT_SECONDS, states=self)
        self._mx = mx
        self._guard = threading.Lock()
        self._updater: mxnet_optimizer.Updater | None = None
        self._waiting: dict[str, Array] = {}  # a state loaded before set_optimizer
        self._store: Any = None

    def run_mxnet(self) -> None:
        """Run MXNet's part until the workers stop it."""
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
        except Exception as error:  # MXNet would only print it and continue
            self._abort(f"{type(error).__name__}: {error}")

    def _set_optimizer(self, spec: dict[str, Any]) -> None:
        with self._guard:
            self._updater = mxnet_optimizer.Updater(spec)
            self._updater.load(self._waiting)
        self._store._set_updater(self._update)
        rank = self._store.rank  # any earlier, before ps-lite runs, this crashes (segmentation fault)
        log(f"server {self._environment.index}, rank {rank} of MXNet's servers, steps with {spec['name']}")

    def _update(self, key: int, gradient: Any, weight: Any) -> None:
        try:
            with self._guard:
                assert self._updater is not None  # _set_optimizer makes the updater before it registers `_update`
                self._updater(key, gradient, weight)
        except Exception as error:  # MXNet would continue with the old weights
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

    def unpack_state(self, data: bytearray, view: int) -> None:
        """Load this server's part of a state, which may contain those of all servers."""
        own = f"{self._store.rank}/"
        try:
            arrays = npz.read(data)
            state = {name.removeprefix(own): array for name, array in arrays.items() if name.startswith(own)}
            with self._guard:
                self._waiting = state
                if self._updater:
                    self._updater.load(state)
        except (ValueError, KeyError) as error:
            raise Rejected(f"the optimizer state cannot be read: {error}") from error
