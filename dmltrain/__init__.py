"""dmltrain: distributed parameter-server training over ordinary networks.

Importing this package imports no framework. A plain PyTorch script needs three functions (examples/plain_torch.py)::

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
    """Wrap `optimizer` so that each `step()` uses the mean of all workers' gradients.

    Every worker starts from worker 0's weights. `kvstore` is one of dmltrain.kvstore.TYPES. Without `dmltrain-launch`
    (no DMLC_ROLE in the environment) the script trains alone, as before. In a scheduler or server process this call
    serves the job and then exits.

    With `defer`, `step()` returns at once, and the next `model(x)` waits for each weight just before it reads it. The
    results are the same. Code that reads weights otherwise than by `model(x)` or `model.state_dict()` must then call
    `optimizer.settle()` first.
    """
    from dmltrain.backends.torch import release

    release.check()
    from dmltrain.backends.torch import distributed

    store = _store(kvstore)
    on_servers = bool(_worker().update_on_kvstore)
    return distributed.distribute(model, optimizer, store, update_on_kvstore=on_servers, defer=defer)


def rank() -> int:
    """This worker's rank, 0 to num_workers() - 1. In a scheduler or server process: serve the job, then exit."""
    return _worker().index


def num_workers() -> int:
    """The number of workers of the job; 1 without `dmltrain-launch`."""
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
        raise UserError(f"kvstore {kind}: this process already uses {_stores[0].type}; use that for every model")
    if not _stores or not environment.launched:
        _stores[:] = [kvstore.create(kind if environment.launched else "local")]
    return _stores[0]


_stores: list[KVStore] = []  # at most one: a process joins its job once, however many models it trains
