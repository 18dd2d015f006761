"""The options of the group Distribution."""

from __future__ import annotations

from dataclasses import dataclass

from dmltrain import kvstore
from dmltrain.backends.table import BACKENDS
from dmltrain.base import env
from dmltrain.kvstore import codec, types
from dmltrain.options.field import Group, option
from dmltrain.options.values import integer, number, one_of, path, switch

STEP_DEFAULTS = " and ".join(
    f"{int(backend.capabilities.update_on_kvstore)} with {name}" for name, backend in BACKENDS.items()
)
FEWER_CODECS = "; ".join(
    f"{name} has {', '.join(backend.capabilities.codecs)}"
    for name, backend in BACKENDS.items()
    if set(backend.capabilities.codecs) < set(codec.TYPES)
)
# Names of kvstore types, for help texts: those with --staleness, with --update-on-kvstore and so on.
WITH_STALENESS = ", ".join(types.names(lambda kind: kind.takes_staleness))
WITH_UPDATE_ON_KVSTORE = ", ".join(types.names(lambda kind: len(kind.optimizer_on) > 1))
WITH_LOCAL_STEPS = ", ".join(types.names(lambda kind: kind.steps_alone))
WITH_FACTORS = ", ".join(types.names(lambda kind: kind.takes_factors))
WITH_SHARES = ", ".join(types.names(lambda kind: kind.distributed and "workers" in kind.optimizer_on))
LOCAL_STEPS = next(kind.local_steps for kind in types.TABLE if kind.local_steps)  # the defaults
WITH_HOST_SUM = ", ".join(types.names(lambda kind: kind.sums_in_host))
FACTORS = ("off", "auto")
SNAPSHOT_SECONDS = 10.0  # --server-snapshot


@dataclass(frozen=True)
class DistributionOptions(Group):
    """See `Options`."""

    kv_store: str = option(
        "Distribution",
        "kvstore type, which says how workers share weights: " + ", ".join(kvstore.TYPES),
        one_of("kvstore", kvstore.TYPES),
        "device",
    )
    staleness: int | None = option(
        "Distribution", f"{WITH_STALENESS}: number of steps a worker may be ahead of the slowest one", integer(0)
    )
    local_steps: int | None = option(
        "Distribution",
        f"{WITH_LOCAL_STEPS}: number of steps that a worker makes alone before all workers' weights are averaged "
        f"(default: {LOCAL_STEPS.steps}); the end of an epoch, a snapshot and a test average them as well",
        integer(1),
        metavar="STEPS",
    )
    outer_lr: float | None = option(
        "Distribution",
        f"{WITH_LOCAL_STEPS}: learning rate of the outer optimizer, whose gradient is the weights before the local "
        f"steps minus the workers' mean after them; 1 without momentum takes the mean (default: "
        f"{LOCAL_STEPS.outer_lr:g})",
        number(0.0, above=True),
        metavar="RATE",
    )
    outer_momentum: float | None = option(
        "Distribution",
        f"{WITH_LOCAL_STEPS}: Nesterov momentum of the outer optimizer, below 1 (default: "
        f"{LOCAL_STEPS.outer_momentum:g})",
        number(0.0),
        metavar="MOMENTUM",
    )
    update_on_kvstore: int | None = option(
        "Distribution",
        f"{WITH_UPDATE_ON_KVSTORE}: 1 runs the optimizer on the servers (default: MXNET_UPDATE_ON_KVSTORE, else "
        f"{STEP_DEFAULTS})",
        integer(0),
    )
    gc_type: str = option(
        "Distribution",
        f"gradient compression to and from the servers: {', '.join(codec.TYPES)}; {FEWER_CODECS}",
        one_of("gradient compression", codec.TYPES),
        "none",
    )
    gc_threshold: float | None = option(
        "Distribution",
        "2bit: threshold of the quantization, compared with gradients summed over a step's samples; what is not sent "
        "is added to the next gradient (default: 0.5 with mxnet, levels that adapt to the gradients with torch)",
        number(0.0, above=True),
    )
    gc_ratio: float = option(
        "Distribution", "topk: fraction of a gradient's elements to send", number(0.0, above=True), 0.01
    )
    factors: str = option(
        "Distribution",
        f"{WITH_FACTORS}: auto lets dense layers send sufficient factors (two small matrices whose product is the "
        "gradient) where that is faster; the log says which layers do, and why",
        one_of("factors", FACTORS),
        "off",
    )
    transport: str | None = option(
        "Distribution",
        "how gradients reach the servers: shm (shared memory), tcp, or auto: shm to servers on the same host, else "
        "tcp (default: DMLTRAIN_TRANSPORT, else auto)",
        one_of("transport", env.TRANSPORTS),
    )
    server_shares: str | None = option(
        "Distribution",
        f"{WITH_SHARES}: links gives servers behind slow links fewer weights, by rates that are measured before the "
        "first step; equal gives all as many (default: DMLTRAIN_SERVER_SHARES, else equal)",
        one_of("server_shares", env.SERVER_SHARES),
    )
    host_sum: str | None = option(
        "Distribution",
        f"{WITH_HOST_SUM}: auto sums the gradients of a host's workers on that host and sends one stream to servers on "
        "other hosts; off sends one stream per worker (default: DMLTRAIN_HOST_SUM, else auto)",
        one_of("host sum", env.HOST_SUMS),
    )
    balance: bool = option(
        "Distribution",
        "elastic jobs: each worker's part of a step's samples follows the speed at which it computes",
        switch,
        False,
        nargs="?",
        const=True,
    )
    server_snapshot: float | None = option(
        "Distribution",
        "elastic jobs whose servers run the optimizer: seconds between two copies of each server's optimizer state "
        "into the memory of two workers, with which the job goes on if the server is lost (0: after each step; "
        f"default: {SNAPSHOT_SECONDS:g})",
        number(0.0),
        metavar="SECONDS",
    )
    audit: str | None = option(
        "Distribution",
        "elastic jobs: write into this folder which samples each worker has used in which round, and views.json with "
        "who took part in them",
        path,
        metavar="FOLDER",
    )
    replay: str | None = option(
        "Distribution",
        "elastic jobs: lose the same workers after the same rounds as the job that wrote this views.json, so that the "
        "weights are the same, bit for bit",
        path,
        metavar="FILE",
    )
