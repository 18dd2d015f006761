"""The network of a test bed: a switch in a namespace of its own, and a shaped link from it to each host.

The switch's end of a link has the host's name; the host's end is eth0. A link is limited at both ends by a token
bucket (tbf), which every Linux kernel has. A partition moves ports to a bridge of their own, because then the cards
of the hosts keep their carrier, as behind a broken switch; `unplug` takes the carrier away, as a pulled cable does.
"""

from collections.abc import Sequence
from typing import Any

from tests.cluster.command import TestbedError, attempt, ip, ip_json, namespaces, run, tc
from tests.cluster.layout import LOGIN, NETWORK, Layout, address, bits_per_second, mac

BRIDGE = "bridge"
ISLAND = "island"
BRIDGE_TYPE = "type bridge stp_state 0 forward_delay 0 mcast_snooping 0"  # forwards at once

# A token bucket counts a full frame as 1514 bytes; with preamble, checksum and gap it takes 1538 on the wire.
COUNTED = 1514 / 1538
# The kernel sends packets larger than frames, up to this many bytes (gso_max_size). A bucket that cannot hold one has
# it cut into frames, at many times the CPU; so one is as large as 0.25 ms of the link, and the bucket a bit larger.
SMALLEST_PACKET, LARGEST_PACKET, PACKET_SECONDS = 4096, 65536, 0.25e-3
BUCKET_SPARE = 8192  # bytes
QUEUE_BYTES, QUEUE_SECONDS = 512 * 1024, 0.05  # of a port: a small switch's buffer, but never more than 50 ms


def make_switch(layout: Layout) -> None:
    """Make the switch unless it is there."""
    if layout.switch not in namespaces():
        run("ip", "netns", "add", layout.switch)
    if BRIDGE not in ports(layout):
        made = (f"link add {BRIDGE} {BRIDGE_TYPE}", f"link set {BRIDGE} addrgenmode none up")
        ip(layout.switch, "link set lo up", *made)


def plug_in(layout: Layout, host: str) -> None:
    """Join the host's namespace to the switch.

    Its route names TCP's congestion control: the machine's own may be bbr, which shares these links unfairly, and a
    namespace may not change its default to one that the machine does not list as allowed.
    """
    own = layout.namespace(host)
    ip(
        layout.switch,
        f"link add {host} type veth peer name eth0 address {mac(host)} netns {own}",
        f"link set {host} addrgenmode none up master {BRIDGE}",
    )
    ip(
        own,
        "link set lo up",
        "link set eth0 addrgenmode none up",
        f"address add {address(host)}/24 broadcast + dev eth0 noprefixroute",
        f"route add {NETWORK}.0/24 dev eth0 proto kernel scope link src {address(host)} congctl cubic",
    )


def shape(layout: Layout, hosts: Sequence[str], rate: str) -> None:
    """Limit the hosts' links, each way. `login` is not limited, whatever `rate` is."""
    ends = [(layout.namespace(host), [("eth0", host)]) for host in hosts]
    for namespace, devices in [*ends, (layout.switch, [(host, host) for host in hosts])]:
        limits = [(device, *_limits(host, rate)) for device, host in devices]
        ip(namespace, *(f"link set {device} gso_max_size {packet}" for device, packet, _ in limits))
        tc(namespace, *(f"qdisc replace dev {device} root {queue}" for device, _, queue in limits))


def _limits(host: str, rate: str) -> tuple[int, str]:
    """The largest packet of a device of the host's link, in bytes, and its queue, for tc."""
    speed = 0.0 if host == LOGIN else bits_per_second(rate)
    packet = largest_packet(speed)
    bucket = packet + BUCKET_SPARE
    queue = int(max(2 * bucket, min(QUEUE_BYTES, speed / 8 * QUEUE_SECONDS)))
    return packet, f"tbf rate {int(speed * COUNTED)}bit burst {bucket} limit {queue}" if speed else "noqueue"


def largest_packet(speed: float) -> int:
    """Bytes of the largest packet that is sent whole at `speed` bits per second; 0 is a link without limit."""
    wanted = speed / 8 * PACKET_SECONDS if speed else LARGEST_PACKET
    size = SMALLEST_PACKET
    while size < min(wanted, LARGEST_PACKET):
        size *= 2
    return size


def ports(layout: Layout) -> dict[str, dict[str, Any]]:
    """The switch's devices by name, as `ip -j link` shows them; none where there is no switch."""
    try:
        return {device["ifname"]: device for device in ip_json("-n", layout.switch, "link")}
    except TestbedError:
        return {}


def cut_off(layout: Layout, hosts: list[str]) -> None:
    """These hosts reach each other and nobody else."""
    there = ports(layout)
    island = next(f"{ISLAND}{number}" for number in range(len(there) + 1) if f"{ISLAND}{number}" not in there)
    ip(
        layout.switch,
        f"link add {island} {BRIDGE_TYPE}",
        f"link set {island} addrgenmode none up",
        *(f"link set {host} master {island}" for host in hosts if host in there),
    )


def pull(layout: Layout, host: str) -> None:
    """The host's cable is out: it sees no carrier."""
    ip(layout.switch, f"link set {host} down")


def remove_link(layout: Layout, host: str) -> None:
    """The host's link is gone, on both sides."""
    attempt("ip", "-n", layout.switch, "link", "delete", host)


def heal(layout: Layout, hosts: list[str]) -> None:
    """The cables are in again, and these hosts on the common bridge."""
    there = ports(layout)
    ip(layout.switch, *(f"link set {host} up master {BRIDGE}" for host in hosts if host in there))
    there = ports(layout)
    used = {device.get("master") for device in there.values()}
    ip(layout.switch, *(f"link delete {name}" for name in there if name.startswith(ISLAND) and name not in used))


def link_state(layout: Layout, host: str) -> str:
    """up, unplugged, cut off (in a partition) or gone."""
    device = ports(layout).get(host)
    if device is None:
        return "gone"
    if "UP" not in device["flags"]:
        return "unplugged"
    return "up" if device.get("master") == BRIDGE else "cut off"
