"""What is compared in the training contests: one row a system. A new one is a row, and a class in trainee.py."""

from __future__ import annotations

from dataclasses import dataclass

STALENESS = 10  # of dist_ssp, in steps


@dataclass(frozen=True)
class System:
    """A way to train with several workers. `codec`: what gradients are sent as. `lossy`: its weights are not those of
    plain gradients, bit for bit. `early` and `defer`: of dmltrain.distribute; `factors`: dense layers may send
    sufficient factors. `links`: servers behind slow links hold less. `apart`: servers are on hosts of their own.
    `kvstore`: the type of dmltrain's. `group`: the backend of DDP's process group; "" without DDP."""

    label: str
    servers: bool
    codec: str = "none"
    early: bool = False
    defer: bool = False
    factors: bool = False
    links: bool = False
    apart: bool = False
    kvstore: str = "dist_sync"
    group: str = ""

    @property
    def synchronous(self) -> bool:
        """All workers have the same weights after each step."""
        return self.kvstore == "dist_sync"

    @property
    def own_pace(self) -> bool:
        """No worker waits for another."""
        return self.kvstore == "dist_async"

    @property
    def lossy(self) -> bool:
        return self.codec != "none" or self.factors or not self.synchronous


SYSTEMS = {
    "ddp": System("DDP, gloo", False, group="gloo"),
    "ddp-bf16": System("DDP, bf16 hook", False, "bf16", group="gloo"),
    "ddp-powersgd": System("DDP, PowerSGD of rank 1", False, "powersgd", group="gloo"),
    "ddp-dmltrain": System("DDP, dmltrain", True, group="dmltrain"),
    "ddp-dmltrain-int8": System("DDP, dmltrain's int8 hook", True, "int8", group="dmltrain"),
    "dmltrain": System("dmltrain", True),
    "dmltrain-early": System("dmltrain, steps early", True, early=True),
    "dmltrain-defer": System("dmltrain, deferred", True, defer=True),
    "dmltrain-bf16": System("dmltrain, bf16", True, "bf16", defer=True),
    "dmltrain-int8": System("dmltrain, int8", True, "int8", defer=True),
    "dmltrain-links": System("dmltrain, shares by links", True, defer=True, links=True),
    "dmltrain-apart": System("dmltrain, spare hosts", True, defer=True, apart=True),
    "dmltrain-ssp": System(f"dmltrain, dist_ssp, {STALENESS}", True, early=True, kvstore="dist_ssp"),
    "dmltrain-async": System("dmltrain, dist_async", True, early=True, kvstore="dist_async"),
    "dmltrain-factors": System("dmltrain, sufficient factors", True, defer=True, factors=True),
}
