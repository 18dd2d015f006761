"""The key-value store through which workers exchange gradients and weights: MXNet's KVStore by name and meaning.

The training loop sees only `create` and the methods of `KVStore` (base.py). In a scheduler or server process `create`
serves the job and then ends the process, so that one program can be started in every role, as MXNet's are.
"""

from __future__ import annotations

import sys
from typing import NoReturn

from dmltrain import env
from dmltrain.env import Environment
from dmltrain.errors import JobLost, UserError, exit_now
from dmltrain.kvstore.base import TYPES, Handle, KVStore

__all__ = ["TYPES", "Handle", "KVStore", "create", "serve", "serve_and_exit"]


def create(kind: str = "local", *, staleness: float | None = None, environment: Environment | None = None) -> KVStore:
    """A store of one of TYPES; `staleness` (clocks) only with dist_ssp. Raises UserError or JobLost.

    dist_* waits until all processes of the job are there.
    """
    if kind not in TYPES:
        raise UserError(f"unknown kvstore {kind!r}; choose one of {', '.join(TYPES)}")
    meaning = TYPES[kind]
    if staleness is not None and meaning != "dist_ssp":
        raise UserError(f"--staleness belongs to kvstore dist_ssp; this is {kind}")
    environment = environment or env.read()
    if not meaning.startswith("dist"):
        if environment.role != "worker":
            sys.exit(0)  # a one-worker store needs no servers
        from dmltrain.kvstore.local import LocalKVStore

        return LocalKVStore(kind)
    if environment.role != "worker":
        serve_and_exit(environment)
    return _connect(kind, meaning, staleness, environment)


def _connect(kind: str, meaning: str, staleness: float | None, environment: Environment) -> KVStore:
    if not environment.launched:
        raise UserError(f"kvstore {kind} needs a scheduler and servers: start the program with "
                        "dmltrain-launch -n WORKERS -s SERVERS PROGRAM ..., or use --kv-store local")
    if environment.num_servers == 0:
        raise UserError(f"kvstore {kind} needs at least one server, this job has none (-s 0): "
                        "start it with -s 1 or more, or use --kv-store local")
    from dmltrain.kvstore.dist import DistKVStore

    if DistKVStore.present:
        raise UserError("this process has a distributed kvstore already: create one and use it for everything")
    bound = {"dist_sync": 0.0, "dist_async": float("inf"), "dist_ssp": 3.0 if staleness is None else float(staleness)}
    if not bound[meaning] >= 0.0:
        raise UserError(f"--staleness {staleness}: expected 0 or more clocks")
    return DistKVStore(kind, meaning, bound[meaning], environment)


def serve(environment: Environment) -> str:
    """Be this job's scheduler, or one of its servers, until the job ends. Returns why it was lost, or ''."""
    if environment.role == "scheduler":
        from dmltrain.kvstore.scheduler_process import SchedulerProcess

        return SchedulerProcess(environment).run()
    from dmltrain.kvstore.server_process import ServerProcess

    return ServerProcess(environment).run()


def serve_and_exit(environment: Environment) -> NoReturn:
    """`serve`, then end the process: 0, or 75 with the reason on standard error when the job was lost."""
    try:
        reason = serve(environment)
    except JobLost as error:
        reason = str(error)
    except UserError as error:
        sys.stderr.write(f"dmltrain: {environment.role} {environment.index}: error: {error}\n")
        exit_now(UserError.exit_code)
    except KeyboardInterrupt:
        exit_now(130)
    if reason:
        sys.stderr.write(f"dmltrain: {environment.role} {environment.index}: {reason}\n")
    exit_now(JobLost.exit_code if reason else 0)
