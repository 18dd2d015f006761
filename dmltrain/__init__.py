"""dmltrain: distributed parameter-server training over ordinary networks.

Importing this package imports no framework. A plain PyTorch script uses three things of it (examples/plain_torch.py)::

    import dmltrain
    optimizer = dmltrain.distribute(model, optimizer)
    dmltrain.rank(), dmltrain.num_workers()          # for the sampler
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dmltrain.errors import UserError

if TYPE_CHECKING:
    import torch

    from dmltrain.backends.torch.distributed import DistributedOptimizer
    from dmltrain.env import Environment
    from dmltrain.kvstore import KVStore

__version__ = "0.4.0"


def distribute(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, kvstore: str = "dist_sync", *, defer: bool = False
) -> DistributedOptimizer:
    """Return `optimizer` so that each `step()` uses the gradients of all workers (their mean).

    The model starts from worker 0's weights on every worker. `kvstore` is one of dmltrain.kvstore.TYPES. Outside
    `dmltrain-launch` (no DMLC_ROLE in the environment) the script trains alone, unchanged. In a scheduler or server
    process this call serves the job and then exits.

    `defer`: `step()` returns at once, and the next `model(x)` waits for weights one by one, where it first reads them;
    the results are the same. Whatever reads weights in another way than `model(x)` and `model.state_dict()` then calls
    `optimizer.settle()` before.
    """
    from dmltrain.backends.torch import distributed as torch_distributed

    store = _store(kvstore)
    on_servers = bool(_worker().update_on_kvstore)
    return torch_distributed.distribute(model, optimizer, store, update_on_kvstore=on_servers, defer=defer)


def rank() -> int:
    """This worker's number, 0 .. num_workers() - 1. In a scheduler or server process: serves the job and exits."""
    return _worker().index


def num_workers() -> int:
    """The number of workers of the job; 1 outside `dmltrain-launch`."""
    return _worker().num_workers


def _worker() -> Environment:
    from dmltrain import env, errors, kvstore

    errors.end_scripts_without_traceback()
    environment = env.read()
    if environment.role != "worker":
        kvstore.serve_and_exit(environment)
    return environment


def _store(kind: str) -> KVStore:
    from dmltrain import kvstore

    environment = _worker()
    if environment.launched and _stores and kind != _stores[0].type:
        raise UserError(f"this process uses kvstore {_stores[0].type}; use it for every model")
    if not _stores or not environment.launched:
        _stores[:] = [kvstore.create(kind if environment.launched else "local")]
    return _stores[0]


_stores: list[KVStore] = []  # the process's place in its job is one, however many models it trains
