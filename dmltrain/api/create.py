"""Create the kvstore of a program, or serve its job; in a scheduler or server process `create` does that, and then ends
the process. So the same program can be started in every role, as with MXNet.

Programs call these as `dmltrain.kvstore.create` and so on.
"""

from __future__ import annotations

import sys
from typing import NoReturn

from dmltrain.backends.backend import Backend
from dmltrain.backends.table import BACKENDS
from dmltrain.base import env
from dmltrain.base.env import Environment
from dmltrain.base.errors import JobLost, UserError, exit_now
from dmltrain.kvstore import spawned, types
from dmltrain.kvstore.base import KVStore
from dmltrain.kvstore.worker.store import DistKVStore


def create(
    kind: str = "local",
    *,
    staleness: float | None = None,
    environment: Environment | None = None,
    backend: str = "torch",
    transport: str | None = None,
    host_sum: str | None = None,
    server_shares: str | None = None,
    elastic: bool = False,
) -> KVStore:
    """Create a store of one of TYPES; `staleness` (clocks) only for types that take one. Raises UserError or JobLost.

    dist_* types wait until all processes of the job have registered. `transport` is one of env.TRANSPORTS, `host_sum`
    one of env.HOST_SUMS, `server_shares` one of env.SERVER_SHARES (default: from the environment). `backend` "mxnet":
    MXNet's own kvstores, for NDArrays. `elastic`: whether the caller can go on when the members of an elastic job
    change; without it such a job is refused.
    """
    kvstore_type = types.find(kind)
    chosen = _backend(backend)
    if kvstore_type.name not in chosen.capabilities.kvstores:
        offered = ", ".join(chosen.capabilities.kvstores)
        raise UserError(f"kvstore {kind}: {chosen.title} does not have it; use one of {offered}, or --backend torch")
    bound = kvstore_type.bound(staleness)
    environment = env.with_choices(
        environment or env.read(), transport=transport, host_sum=host_sum, server_shares=server_shares
    )
    if environment.elastic and not elastic:
        raise UserError(
            "kvstore.create: this job was started with --elastic, which programs that use the kvstore directly do "
            "not support: start it without --elastic, or use dmltrain.distribute, State and loader"
        )
    if not kvstore_type.distributed:
        if environment.role != "worker":
            sys.exit(0)  # a one-worker store needs no servers
        return chosen.local_store(kind)
    if environment.role != "worker":
        serve_and_exit(environment, backend)
    return _connect(kind, bound, environment, chosen)


def _connect(kind: str, bound: float, environment: Environment, backend: Backend) -> KVStore:
    if not environment.launched:
        raise UserError(
            f"kvstore {kind} needs a scheduler and servers: start the program with "
            "dmltrain-launch -n WORKERS -s SERVERS PROGRAM ..., or use kvstore local (--kv-store local)"
        )
    if environment.num_servers == 0:
        raise UserError(
            f"kvstore {kind} needs at least one server, this job has none (-s 0): "
            "start it with -s 1 or more, or use kvstore local (--kv-store local)"
        )
    spawned.check(environment)
    if DistKVStore.present:
        raise UserError("this process already has a distributed kvstore: create one and use it for all keys")
    return backend.store(kind, bound, environment)


def serve(environment: Environment, backend: str = "torch") -> str:
    """Run as this job's scheduler, or as one of its servers, until the job ends. Returns why it was lost, or ''."""
    return _backend(backend).serve(environment)


def _backend(name: str) -> Backend:
    if name not in BACKENDS:
        raise UserError(f"unknown backend {name!r}; choose one of {', '.join(BACKENDS)}")
    return BACKENDS[name]


def serve_and_exit(environment: Environment, backend: str = "torch") -> NoReturn:
    """`serve`, then end the process: 0, or 75 with the reason on standard error when the job was lost. UserError in a
    process that has the place of the one that has started it."""
    spawned.check(environment)
    try:
        reason, code = serve(environment, backend), JobLost.exit_code
    except JobLost as error:
        reason, code = str(error), error.exit_code
    except UserError as error:
        reason, code = f"error: {error}", error.exit_code
    except KeyboardInterrupt:
        reason, code = "interrupted", 130
    if reason:
        sys.stderr.write(f"dmltrain: {environment.role} {environment.index}: {reason}\n")
    exit_now(code if reason else 0)
    raise AssertionError("this process has ended")
