"""dmltrain: distributed parameter-server training over ordinary networks.

Importing this package imports no framework. A plain PyTorch script needs three functions (examples/plain_torch.py)::

    import dmltrain
    optimizer = dmltrain.distribute(model, optimizer)
    dmltrain.rank(), dmltrain.num_workers()          # for the sampler

One that can resume, and go on when workers are lost, has a state and a loader (examples/elastic_script.py)::

    state = dmltrain.State(model=model, optimizer=optimizer, best=0.0)
    loader = dmltrain.loader(dataset, batch_size=64, seed=1)
    for epoch in state.epochs(10):
        for images, labels in loader:
            ...
        state.save("checkpoint.pt")
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dmltrain.version import __version__ as __version__

if TYPE_CHECKING:
    import torch

    from dmltrain.api.loader import Loader
    from dmltrain.api.state import State as State
    from dmltrain.backends.torch.distributed import DistributedOptimizer
    from dmltrain.base.env import Environment


def distribute(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    kvstore: str = "dist_sync",
    *,
    compression: str | Mapping[str, Any] = "none",
    staleness: float | None = None,
    local_steps: int | None = None,
    outer_lr: float | None = None,
    outer_momentum: float | None = None,
    update_on_kvstore: bool | None = None,
    factors: int = 0,
    transport: str | None = None,
    host_sum: str | None = None,
    server_shares: str | None = None,
    balance: bool = False,
    batch: str = "constant",
    server_snapshot: float | None = None,
    defer: bool = False,
    step_early: bool = False,
    broadcast_buffers: bool = False,
) -> DistributedOptimizer:
    """Wrap `optimizer` so that the workers of a job train one model; with dist_sync each `step()` uses the mean of all
    workers' gradients.

    Every worker starts from worker 0's weights. Without `dmltrain-launch` (no DMLC_ROLE in the environment) the script
    trains alone, as before, and the choices below are only checked. In a scheduler or server process this call serves
    the job and then exits.

    The choices of the training programs, under their names:

    - `kvstore`: one of dmltrain.kvstore.TYPES.
    - `compression` (`--gc-type`): of gradients to the servers and of sums back. One of dmltrain.kvstore.codec.TYPES, or
      the type with its parameter: `{"type": "2bit", "threshold": 0.1}`, `{"type": "topk", "ratio": 0.01}`. A threshold
      is in the unit of `parameter.grad` after `backward()`.
    - `staleness`: for dist_ssp, how many steps a worker may be ahead of the slowest one (default: 3).
    - `local_steps`, `outer_lr`, `outer_momentum`: for dist_local. Each worker makes its `step()` alone. After so many
      steps (default: 50) the workers' weights are averaged, by an outer optimizer with this rate and momentum
      (dmltrain.kvstore.local_steps has the sources). Every worker must call `optimizer.synchronize()` before it
      evaluates or saves.
    - `update_on_kvstore`: whether dist_sync's optimizer runs on the servers (default: MXNET_UPDATE_ON_KVSTORE, or no).
    - `factors`: lets dense layers send sufficient factors where that is faster (dist_sync, the optimizer on the
      workers). The value is the largest number of rows in a worker's step: samples, times positions if the inputs have
      positions. 0: no layer does. `choices` of the result says which layers do, and why.
    - `transport`, `host_sum`, `server_shares`: one of TRANSPORTS, HOST_SUMS, SERVER_SHARES of dmltrain.base.env
      (default: from the environment, else the first one).
    - `balance`: in an elastic job with `dmltrain.State` and `dmltrain.loader`, whether each worker's part of a step's
      samples follows the speed at which it computes (docs/elastic-steps.md).
    - `batch`: in such a job, the samples of a step when the number of workers changes. constant: as many as at the
      start. per-worker: the loader's `batch_size` (times `micro_batches`) of each worker, and learning rates stay.
      per-worker-scaled-lr: the same, and each step multiplies learning rates by its number of samples, divided by that
      of a step at the start; `optimizer.param_groups` keeps the unmultiplied rates.
    - `server_snapshot`: in such a job with the optimizer on the servers, the seconds between two copies of each
      server's optimizer state into the memory of two workers, with which the job goes on if the server is lost
      (default: 10). 0: after each step.

    All models of a process share one kvstore, so each call must make the same choices, except for `factors`,
    `local_steps`, `outer_lr` and `outer_momentum`.

    When the outermost `backward()` returns, each `p.grad` is the mean over the workers (dist_sync, the optimizer on the
    workers), and `step()` is the optimizer's own: a script may do what it does in one process
    (docs/what-a-script-may-do.md). With the optimizer on the servers `step()` sends gradients and receives weights.

    - `step_early`: send gradients during `backward()`, and step each part of the model as soon as its sum has arrived.
      Nothing may read or change gradients between `backward()` and `step()`; some of what does is an error.
    - `broadcast_buffers`: give all workers worker 0's buffers (dist_sync) after a backward pass, when gradients are
      averaged; with `step_early` at each step. DDP does it before each forward pass.

    With `defer`, which implies `step_early`, `step()` returns at once, and the next `model(x)` waits for each weight
    just before it reads it. The results are the same. Code that reads weights in another way than by `model(x)` or
    `model.state_dict()` must then call `optimizer.settle()` first. `factors`, and elastic jobs with the optimizer on
    the servers, also imply `step_early`.

    A later call for the same model replaces the earlier one.

    Raises UserError for values that are wrong or exclude one another, models that differ between workers, weights that
    cannot be sent, and an optimizer that servers do not have where they run it; JobLost.
    """
    environment = _worker()
    from dmltrain.api import script
    from dmltrain.kvstore.choices import ExchangeChoices

    asked = ExchangeChoices(
        kvstore,
        compression,
        staleness,
        local_steps,
        outer_lr,
        outer_momentum,
        update_on_kvstore,
        factors,
        transport,
        host_sum,
        server_shares,
        balance,
        batch,
        server_snapshot,
        defer,
        step_early,
        broadcast_buffers,
    )
    script.check(asked, environment)
    from dmltrain.backends.torch import release

    release.check()
    from dmltrain.backends.torch.distributed import connect

    return connect(model, optimizer, script.store(asked, environment), asked.of_job(environment))


def loader(
    dataset: Any,
    batch_size: int = 1,
    *,
    micro_batches: int = 1,
    seed: int = 0,
    drop_last: bool = False,
    **options: Any,
) -> Loader:
    """The batches of a map-style `dataset` for the newest State, dealt out to all workers: each sample once in each
    epoch, in an order that follows from seed and epoch.

    Read it once in each turn of `for epoch in state.epochs(...)`, and call `optimizer.step()` once for each batch. With
    dist_sync the step uses the mean over the samples of all workers' batches, also if these are unequal; for that the
    loss must be the mean over the worker's batch. `batch_size` is the number of samples in one worker's batch. If fewer
    workers are left in an elastic job, each gets more samples, unless `distribute` was asked for another kind of
    `batch`.

    At an epoch's end there may be fewer samples than workers, and in an elastic job a worker that joins has none in its
    first step. Such a worker gets a batch of other samples, whose gradients count as zeros: `loader.count`, the number
    of samples of the present batch that count, is 0. With dist_local it gets one batch less instead.

    `micro_batches`: the number of batches in a step; only one at a time is in memory. Gradients add up correctly for
    any sizes of the batches, and losses are not divided. Call `step()` and `zero_grad()` if `loader.step_ends` is true.

    `drop_last`: an epoch has whole steps only. The samples that it leaves out come in the next epoch.
    `options`: those of torch.utils.data.DataLoader, such as `num_workers`, `collate_fn` and `pin_memory`.

    Raises UserError for wrong values, and without a State.
    """
    from dmltrain.api.loader import Loader
    from dmltrain.api.state import newest

    return Loader(newest(), dataset, batch_size, micro_batches, seed, drop_last, options)


def audited(sampler: Any, folder: str | None = None, samples: int | None = None) -> Any:
    """The same sampler, batch sampler or DataLoader, which also writes down what each rank draws: `dmltrain audit` then
    says whether each sample was used once in each epoch (docs/adapters.md).

    Wrap what this rank alone reads, before the first epoch: a DistributedSampler, or a loader that Accelerate has
    prepared. A loader is changed in place. `folder`: of the files (default: DMLTRAIN_AUDIT, else `audit`), the same one
    when a script goes on from a checkpoint. `samples`: of the dataset, where the sampler does not know it.

    Raises UserError if the files cannot be written, or the number of samples is not known.
    """
    from dmltrain.audit import draws

    return draws.audited(sampler, folder, samples)


def __getattr__(name: str) -> Any:
    """State, which needs more than scripts without it."""
    if name != "State":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from dmltrain.api.state import State

    return State


def rank() -> int:
    """This worker's rank, 0 to num_workers() - 1. In a scheduler or server process: serve the job, then exit."""
    return _worker().index


def num_workers() -> int:
    """The number of workers of the job; 1 without `dmltrain-launch`."""
    return _worker().num_workers


def _worker() -> Environment:
    from dmltrain import kvstore
    from dmltrain.base import env, errors

    errors.end_scripts_without_traceback()
    environment = env.read()
    if environment.role != "worker":
        kvstore.serve_and_exit(environment)
    return environment
