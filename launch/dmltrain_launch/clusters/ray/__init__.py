"""Nodes of a Ray cluster: a placement group reserves them, and an actor on each starts the bridge.

A program beside the launcher talks to Ray, `driver`. It gets the placement before the job starts, so a wait for that
does not count for the job's limits. `relay` brings it orders for bridges, and is what the rest of the launcher knows as
the engine. When driver or launcher end, whatever ends them, Ray removes placement group and actors, and with an actor
its bridge ends. With --submit the launcher itself runs in Ray, on its head: `queue`, `inside`.
"""

from __future__ import annotations

from dmltrain_launch.clusters.launcher import HOSTS, Launcher, own_options
from dmltrain_launch.clusters.ray.placement import STRATEGIES, STRICT_SPREAD, listing, resources
from dmltrain_launch.job.options import Options
from dmltrain_launch.job.options.option import Record, choice, number, option, parsed, text


@own_options
class RayOptions(Options):
    """The options of --launcher ray."""

    address: str = option(  # "": auto
        "HOST:PORT|URL",
        "Ray cluster to use, for --launcher ray; if its launcher is to run in Ray, the URL of Ray's dashboard "
        "(default: auto, the cluster that this machine belongs to)",
        text("auto, HOST:PORT or a URL"),
        after="--yarn-hosts",
        record=Record(),
        here=True,
    )
    ray_nodes: int = option(
        "N", "bundles of Ray's placement group, each on a node of its own (default: one per worker)", number(int, 1), 0
    )
    ray_resources: str = option(
        "CPU=8,GPU=2",
        "resources of each bundle, by Ray's names, also memory=16g and your own (default: CPU=1)",
        parsed(lambda given: given if resources(given) else ""),
    )
    ray_strategy: str = option(
        "NAME",
        f"how Ray spreads the bundles: {listing()} (default: {STRICT_SPREAD})",
        choice(STRATEGIES),
        STRICT_SPREAD,
    )
    ray_runtime_env: str = option(
        "FILE|JSON",
        "runtime environment of the job in Ray: a YAML or JSON file, or JSON",
        text("a file or JSON"),
        here=True,
    )


LAUNCHER = Launcher(
    "nodes of a Ray cluster",
    RayOptions,
    (*HOSTS, "submit", "launcher_inside", "queue_wait"),
    cluster="hosts",
    queue="queue",
    undetached="Ray ends the job when its launcher is lost; use --submit, which returns at once and whose launcher "
    "runs in Ray, and leave --detach out",
)
