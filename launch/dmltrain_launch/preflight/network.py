"""Choose each host's address on the network that all hosts of a job share. Pure: the hosts' interfaces are arguments.

The first rule that applies to a host counts:
1. addr= in the hosts file, which must belong to one of the host's interfaces; or interface= there.
2. --interface NAME: the host's first IPv4 address there, else its first IPv6 address.
3. --subnet 10.0.0.0/24: the host's first address in it.
4. A single host: the address that SSH connected to, if an interface has it, else 127.0.0.1.
5. The network that all hosts share (for a host with addr=, the network of that address). Not considered are loopback
   and link-local networks, unplugged interfaces, and networks in which two hosts have the same address, because that is
   a bridge inside each host (docker0). Of several networks these are preferred, in this order: no virtual bridge
   (docker0, virbr0, cni0, ...), IPv4 (ps-lite supports nothing else), SSH connected to most hosts over its interfaces,
   the fastest link, the lowest network number.
6. Without such a network (hosts behind routers): the address that SSH connected to, if an interface has it; else the
   host's only address.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dmltrain_launch import LaunchError
from dmltrain_launch.job.host import Host

if TYPE_CHECKING:  # a module of the agent, which the launcher does not run
    from dmltrain_launch.agent.host.interface import Interface

VIRTUAL = re.compile(r"(docker|podman|virbr|lxcbr|lxdbr|lxc|cni|veth|vnet|vmnet|vboxnet)\d|br-|flannel|cali|kube-")
FIX = "choose it with --interface NAME or --subnet 10.0.0.0/24, or give addr= in the hosts file"
LOOPBACK = "127.0.0.1"
NETWORK = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True)
class Address:
    """An address of an interface of a host. `speed` of its link in Mbit/s, 0 if unknown."""

    ip: str
    nic: str
    network: NETWORK
    loopback: bool = False
    running: bool = True
    speed: int = 0

    @property
    def shareable(self) -> bool:
        return self.running and not (self.loopback or self.network.is_loopback or self.network.is_link_local)

    def __str__(self) -> str:
        return f"{self.ip}/{self.network.prefixlen} on {self.nic}{'' if self.running else ' (unplugged)'}"


Addresses = Mapping[str, Sequence[Address]]  # of each host by name


def choose(
    hosts: Sequence[Host],
    interfaces: Mapping[str, Sequence[Interface]],
    interface: str = "",
    subnet: str = "",
    reached: Mapping[str, str] | None = None,
) -> dict[str, tuple[str, str]]:
    """(IP, name of its interface) of each host by name; LaunchError with hosts, their addresses and the fix.

    `interfaces` has what `dmltrain_launch.agent.host.interface` found on each host. If it found none, an address is
    used unchecked and its interface is "". `reached` has the IPs that SSH connected to ("" or missing: unknown)."""
    have = {host.name: _addresses(interfaces.get(host.name) or ()) for host in hosts}
    peers = {name: address for name, address in (reached or {}).items() if address}
    chosen = {host.name: _given(host, have[host.name]) for host in hosts if host.address}
    named = [host for host in hosts if host.interface and not host.address]
    for host in named:
        chosen.update(_on_interface([host], have, host.interface, f"{host.where or host.name}: interface"))
    rest = [host for host in hosts if host.name not in chosen]
    if interface:
        chosen.update(_on_interface(rest, have, interface, "--interface"))
    elif subnet:
        chosen.update(_in_subnet(rest, have, subnet))
    elif len(hosts) == 1:
        chosen.update({host.name: _of_single_host(have[host.name], peers.get(host.name, "")) for host in rest})
    elif rest:
        chosen.update(_shared(rest, {**have, **{name: [address] for name, address in chosen.items()}}, peers))
    _refuse_duplicates(hosts, chosen)
    return {host.name: (chosen[host.name].ip, chosen[host.name].nic) for host in hosts}


def _addresses(rows: Iterable[Interface]) -> list[Address]:
    addresses = []
    for row in rows:
        network = ipaddress.ip_interface(f"{row['address']}/{row['prefix']}").network
        more = {"loopback": row.get("loopback", False), "running": row.get("running", True)}
        addresses.append(Address(row["address"], row["name"], network, speed=row.get("speed") or 0, **more))
    return addresses


def _given(host: Host, have: Sequence[Address]) -> Address:
    where = f"{host.where}: " if host.where else ""
    try:
        ip = ipaddress.ip_address(host.address)
    except ValueError:
        message = f"{where}addr={host.address} of {host.name} is not an IP address; {host.name} has {_listing(have)}"
        raise LaunchError(message) from None
    given = _with_ip(have, str(ip))
    if given or not have:
        return given or _unchecked(str(ip))
    loopback = next((address for address in have if address.loopback and ip in address.network), None)
    if loopback:  # all of 127.0.0.0/8 belongs to this host
        return Address(str(ip), loopback.nic, loopback.network, loopback=True)
    raise LaunchError(f"{where}no interface of {host.name} has addr={host.address}: the host has {_listing(have)}")


def _on_interface(hosts: Sequence[Host], have: Addresses, nic: str, what: str) -> dict[str, Address]:
    on_nic = {host.name: _first(address for address in have[host.name] if address.nic == nic) for host in hosts}
    return _complete(on_nic, have, f"{what} {nic}: no address of that interface", "--subnet 10.0.0.0/24 or addr=")


def _in_subnet(hosts: Sequence[Host], have: Addresses, subnet: str) -> dict[str, Address]:
    try:
        network = ipaddress.ip_network(subnet, strict=False)
    except ValueError as error:
        raise LaunchError(f"--subnet {subnet}: expected a network such as 10.0.0.0/24 ({error})") from None
    inside = {
        host.name: _first(address for address in have[host.name] if ipaddress.ip_address(address.ip) in network)
        for host in hosts
    }
    return _complete(inside, have, f"--subnet {subnet}: no address in it", "another --subnet, --interface or addr=")


def _complete(addresses: Mapping[str, Address | None], have: Addresses, what: str, fix: str) -> dict[str, Address]:
    without = [name for name, address in addresses.items() if address is None]
    if without:
        raise LaunchError(
            "\n".join([*(f"{what} on {name}, which has {_listing(have[name])}" for name in without), f"use {fix}"])
        )
    return {name: address for name, address in addresses.items() if address}


def _of_single_host(have: Sequence[Address], reached: str) -> Address:
    return _with_ip(have, reached) or _with_ip(have, LOOPBACK) or _unchecked(LOOPBACK)


def _shared(hosts: Sequence[Host], have: Addresses, peers: Mapping[str, str]) -> dict[str, Address]:
    """The addresses of `hosts` on the network that all hosts in `have` share; else those that SSH connected to."""
    common = _common(have)
    if not common:
        return {host.name: _routed(host.name, have, peers.get(host.name, "")) for host in hosts}
    best = min(common.values(), key=lambda members: _rank(members, have, peers))
    return {host.name: best[host.name] for host in hosts}


def _common(have: Addresses) -> dict[NETWORK, dict[str, Address]]:
    """The networks in which all hosts have different addresses, with each host's first address there."""
    by_network: dict[NETWORK, dict[str, Address]] = {}
    for name, addresses in have.items():
        for address in addresses:
            if address.shareable:
                by_network.setdefault(address.network, {}).setdefault(name, address)
    return {
        network: members
        for network, members in by_network.items()
        if len(members) == len(have) == len({member.ip for member in members.values()})
    }


def _rank(members: Mapping[str, Address], have: Addresses, peers: Mapping[str, str]) -> tuple[int, ...]:
    """The sort key of a network; the lowest is best."""
    network = next(iter(members.values())).network
    over = sum(
        any(each.nic == address.nic and each.ip == peers.get(name) for each in have[name])
        for name, address in members.items()
    )
    virtual = any(VIRTUAL.match(member.nic) for member in members.values())
    speed = min(member.speed for member in members.values())
    return virtual, network.version, -over, -speed, int(network.network_address), network.prefixlen


def _routed(name: str, have: Addresses, reached: str) -> Address:
    if not have[name] and reached and not ipaddress.ip_address(reached).is_loopback:
        return _unchecked(reached)
    usable = [address for address in have[name] if address.shareable]
    address = _with_ip(usable, reached)
    if address:
        return address
    if len(usable) == 1:
        return usable[0]
    lines = [f"{host}: {_listing(addresses)}" for host, addresses in have.items()]
    note = f"; SSH connected to {reached}, which none of its interfaces has" if reached else ""
    raise LaunchError(
        "\n".join(
            [
                f"the hosts have no common network, and {name} has no address that is known to be reachable{note}",
                *lines,
                FIX,
            ]
        )
    )


def _refuse_duplicates(hosts: Sequence[Host], chosen: Mapping[str, Address]) -> None:
    by_ip: dict[str, str] = {}
    for host in hosts:
        ip = chosen[host.name].ip
        if ip in by_ip:
            fix = f"list one machine once, with slots=; for two machines {FIX}"
            raise LaunchError(f"{by_ip[ip]} and {host.name} have the same address, {chosen[host.name]}; {fix}")
        by_ip[ip] = host.name


def _with_ip(have: Sequence[Address], ip: str) -> Address | None:
    return next((address for address in have if address.ip == ip), None)


def _first(addresses: Iterable[Address]) -> Address | None:
    """The first address, IPv4 before IPv6. Not a link-local one, which needs the name of an interface."""
    candidates = [address for address in addresses if not address.network.is_link_local]
    return min(candidates, key=lambda each: each.network.version, default=None)


def _unchecked(ip: str) -> Address:
    return Address(ip, "", ipaddress.ip_network(ip))


def _listing(have: Sequence[Address]) -> str:
    if not have:
        return "reported no addresses (its Python lacks ctypes)"
    return (
        ", ".join(str(address) for address in have if address.shareable or not address.running)
        or "no address but loopback"
    )
