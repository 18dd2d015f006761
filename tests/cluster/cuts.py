"""Cuts of the way between two hosts of a test bed, while both reach all others. `heal` undoes them all.

A black-hole route is on one of the hosts, whose kernel knows of it. The other cuts are in the switch, where nobody
hears of them: it drops all IP packets between the two, or large ones only, as where a tunnel on the way carries less
than the hosts believe and nothing tells them so (a path-MTU black hole).
"""

from tests.cluster import network
from tests.cluster.command import attempt, ip, run, tc
from tests.cluster.layout import Layout, address

SINK = "sink"  # a bridge without ports: what is redirected to it is gone (few kernels lack tc's action for that)
# Bits of the length of an IP packet, which may not be cut into frames yet: one of them is set from 1024 bytes on.
LARGE = [f"match u16 {1 << bit:#06x} {1 << bit:#06x} at 2" for bit in range(10, 16)]


def blackhole(layout: Layout, host: str, other: str) -> None:
    ip(layout.namespace(host), f"route add blackhole {address(other)}")


def drop(layout: Layout, host: str, other: str, large_only: bool = False) -> None:
    if SINK not in network.ports(layout):
        ip(layout.switch, f"link add {SINK} {network.BRIDGE_TYPE}", f"link set {SINK} addrgenmode none up")
    for port, to in ((host, other), (other, host)):
        tc(
            layout.switch,
            f"qdisc add dev {port} ingress",
            *(
                f"filter add dev {port} parent ffff: protocol ip u32 match ip dst {address(to)} {size} "
                f"action mirred egress redirect dev {SINK}"
                for size in (LARGE if large_only else [""])
            ),
        )


def dropped(layout: Layout, host: str) -> bool:
    """Whether the switch has dropped packets from this host."""
    shown = run("tc", "-n", layout.switch, "-s", "filter", "show", "dev", host, "parent", "ffff:")
    return any("Sent " in line and "Sent 0 bytes" not in line for line in shown.splitlines())


def heal(layout: Layout, hosts: list[str]) -> None:
    for host in hosts:
        attempt("ip", "-n", layout.namespace(host), "route", "flush", "type", "blackhole")
    if SINK in network.ports(layout):
        for host in hosts:
            attempt("tc", "-n", layout.switch, "qdisc", "del", "dev", host, "ingress")
        ip(layout.switch, f"link delete {SINK}")
