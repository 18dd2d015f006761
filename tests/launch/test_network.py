"""Which address each host has on the network that all share."""

import pytest

from launch import LaunchError
from launch.agent.interface import interfaces
from launch.job.host import Host
from launch.preflight.network import choose

LO = {"name": "lo", "address": "127.0.0.1", "prefix": 8, "loopback": True, "running": True, "speed": None}
H1, H2, H3 = Host("h1"), Host("h2"), Host("h3")


def nics(*rows: str) -> list[dict]:
    """Rows such as "eth0 10.0.0.1/24", after loopback and link-local ones; "1000" is the speed, "down" unplugged."""
    found = [LO, {**LO, "name": "eth0", "address": "fe80::1", "prefix": 64, "loopback": False}]
    for row in rows:
        name, address, *more = row.split()
        ip, _, prefix = address.partition("/")
        speed = next((int(word) for word in more if word.isdigit()), None)
        made = {"name": name, "address": ip, "prefix": int(prefix), "speed": speed, "running": "down" not in more}
        found.append({**LO, "loopback": False, **made})
    return found


def refusal(*arguments: object, **more: object) -> str:
    with pytest.raises(LaunchError) as raised:
        choose(*arguments, **more)
    assert raised.value.code == 2
    return str(raised.value)


def pair(*rows: str) -> dict[str, list[dict]]:
    """Two hosts alike: .1 in the rows is h1's, and .2 or ::2 takes its place on h2."""
    return {"h1": nics(*rows), "h2": nics(*(row.replace(".1/", ".2/").replace("::1/", "::2/") for row in rows))}


def of_two(have: dict[str, list[dict]], *reached: str, **more: object) -> list[tuple[str, str]]:
    """Address and interface of h1 and h2, of which ssh has reached these addresses."""
    found = choose([H1, H2], have, reached=dict(zip(("h1", "h2"), reached, strict=False)), **more)
    return [found["h1"], found["h2"]]


def test_the_only_network_of_all_hosts():
    have = {
        "h1": nics("eth0 192.168.1.4/24", "ib0 10.0.0.1/24"),
        "h2": nics("eno1 192.168.2.4/24", "ib1 10.0.0.2/24"),
        "h3": nics("eth0 192.168.1.5/24", "ib0 10.0.0.3/24"),
    }
    assert choose([H1, H2, H3], have, reached={"h1": "192.168.1.4", "h2": "192.168.2.4"}) == {
        "h1": ("10.0.0.1", "ib0"),
        "h2": ("10.0.0.2", "ib1"),
        "h3": ("10.0.0.3", "ib0"),
    }


TWO = pair("eth0 10.0.0.1/24", "eth1 10.1.0.1/24 100000")
BOTH = pair("eth0 10.0.0.1/24", "eth0 fd00::1/64", "eth1 10.1.0.1/24", "eth1 fd01::1/64")
SPEEDS = pair("eth1 10.1.0.1/24 1000", "eth2 10.2.0.1/24 25000", "eth3 10.3.0.1/24")
BRIDGED = {"h1": nics("br0 172.30.0.1/16", "eth0 10.0.0.1/24"), "h2": nics("br0 172.30.0.1/16", "eth0 10.0.0.2/24")}
ROUTED = {"h1": nics("eth0 10.1.0.1/24", "eth1 172.16.0.1/24"), "h2": nics("eth0 10.2.0.1/24")}
CLOUD = {"h1": nics("eth0 10.128.0.2/32"), "h2": nics("eth0 10.128.0.3/32")}
FORWARDED = ["203.0.113.5", "203.0.113.6"]


@pytest.mark.parametrize(
    ("have", "reached", "chosen"),
    [
        (TWO, ["10.0.0.1", "10.0.0.2"], ["10.0.0.1 eth0", "10.0.0.2 eth0"]),  # of several the one that ssh reached
        (TWO, ["10.1.0.1", "10.1.0.2"], ["10.1.0.1 eth1", "10.1.0.2 eth1"]),
        (BOTH, ["fd01::1", "fd01::2"], ["10.1.0.1 eth1", "10.1.0.2 eth1"]),  # the IPv4 network of that interface
        (SPEEDS, [], ["10.2.0.1 eth2", "10.2.0.2 eth2"]),  # else the fastest
        (pair("eth2 10.2.0.1/24", "eth1 10.1.0.1/24"), [], ["10.1.0.1 eth1", "10.1.0.2 eth1"]),  # and then the lowest
        (BRIDGED, ["172.30.0.1"], ["10.0.0.1 eth0", "10.0.0.2 eth0"]),  # a bridge inside each host is not shared
        (pair("eth0 10.0.0.1/24 down", "eth1 10.1.0.1/24"), [], ["10.1.0.1 eth1", "10.1.0.2 eth1"]),  # not unplugged
        (pair("eth0 fd00::1/64"), [], ["fd00::1 eth0", "fd00::2 eth0"]),  # IPv6 alone will do
        (ROUTED, ["10.1.0.1", "10.2.0.1"], ["10.1.0.1 eth0", "10.2.0.1 eth0"]),  # behind a router what ssh reached
        (CLOUD, FORWARDED, ["10.128.0.2 eth0", "10.128.0.3 eth0"]),  # or the only one, through a forwarded port
        ({**ROUTED, "h1": []}, ["10.1.0.1"], ["10.1.0.1 ", "10.2.0.1 eth0"]),  # unknown interfaces: it has that
    ],
)
def test_the_network_that_two_hosts_share(have, reached, chosen):
    assert of_two(have, *reached) == [tuple(each.split(" ")) for each in chosen]


@pytest.mark.parametrize("bridge", ["docker0", "virbr0", "br-0123456789ab", "cni0", "flannel.1"])
def test_a_virtual_bridge_is_taken_only_when_there_is_nothing_else(bridge):
    both = pair(f"{bridge} 10.0.0.1/16 10000", "eth0 10.9.0.1/24")
    assert of_two(both)[0] == ("10.9.0.1", "eth0")
    assert of_two(pair(f"{bridge} 10.0.0.1/16"))[1] == ("10.0.0.2", bridge)


def test_hosts_without_a_common_network_need_addresses():
    assert "the hosts have no common network" in refusal([H1, H2], pair("eth0 169.254.0.1/16")), "link-local"
    said = refusal([H1, H2], ROUTED, reached={"h1": "203.0.113.5", "h2": "10.2.0.1"})
    assert "h1 has no address" in said and "203.0.113.5" in said
    assert "h1: 10.1.0.1/24 on eth0, 172.16.0.1/24 on eth1" in said and "h2: 10.2.0.1/24 on eth0" in said
    assert all(cure in said for cure in ("--interface", "--subnet", "addr="))


def test_addr_wins_and_the_others_join_its_network():
    have = pair("eth0 10.0.0.1/24", "ib0 10.9.0.1/24")
    told = Host("h1", "10.9.0.1")
    reached = {"h1": "10.0.0.1", "h2": "10.0.0.2"}
    assert choose([told, H2], have, reached=reached) == {"h1": ("10.9.0.1", "ib0"), "h2": ("10.9.0.2", "ib0")}
    both = {"h1": ("10.9.0.1", "ib0"), "h2": ("10.0.0.2", "eth0")}
    assert choose([told, H2], have, interface="eth0") == both
    loopback = [Host("h1", "127.0.0.2"), Host("h2", "127.0.0.3")]
    assert choose(loopback, pair())["h2"] == ("127.0.0.3", "lo"), "any loopback address"
    assert choose([Host("h1", "10.0.0.9")], {"h1": []}) == {"h1": ("10.0.0.9", "")}, "interfaces are unknown"


def test_addr_that_no_interface_has_or_is_a_name():
    said = refusal([Host("h1", "10.0.0.77", where="hosts:3"), H2], pair("eth0 10.0.0.1/24", "eth1 10.1.0.1/24 down"))
    assert said.startswith("hosts:3: no interface of h1 has addr=10.0.0.77")
    assert "10.0.0.1/24 on eth0" in said and "10.1.0.1/24 on eth1 (unplugged)" in said
    said = refusal([Host("h1", "h1-ib", where="hosts:1")], {"h1": nics("eth0 10.0.0.1/24")})
    assert said.startswith("hosts:1: addr=h1-ib of h1 is not an IP address") and "10.0.0.1/24" in said


def test_interface_takes_its_first_ipv4_address_else_ipv6():
    first = nics("ib0 fd00::1/64", "ib0 10.0.0.1/24", "ib0 10.0.0.9/24", "eth0 10.1.0.1/24")
    have = {"h1": first, "h2": nics("ib0 fd00::2/64")}
    assert of_two(have, interface="ib0") == [("10.0.0.1", "ib0"), ("fd00::2", "ib0")]
    have = {"h1": nics("ib0 10.0.0.1/24"), "h2": nics("ib1 10.0.0.2/24"), "h3": nics()}
    said = refusal([H1, H2, H3], have, interface="ib0")
    assert "h1" not in said
    assert "--interface ib0: no address of that interface on h2, which has 10.0.0.2/24 on ib1" in said
    assert "on h3, which has no address but loopback" in said and "--subnet" in said


def test_subnet():
    have = pair("eth0 10.0.0.1/24", "eth1 10.1.0.1/24", "eth2 fd00::1/64")
    assert of_two(have, subnet="10.1.0.0/24")[1] == of_two(have, subnet="10.1.0.7/16")[1] == ("10.1.0.2", "eth1")
    assert of_two(have, subnet="fd00::/64")[1] == ("fd00::2", "eth2")
    said = refusal([H1, H2], have, subnet="10.7.0.0/24")
    assert "--subnet 10.7.0.0/24: no address in it on h1, which has 10.0.0.1/24 on eth0" in said
    assert "--subnet ten: expected a network such as 10.0.0.0/24" in refusal([H1, H2], have, subnet="ten")


def test_a_single_host_has_what_ssh_reached_or_loopback():
    have = {"h1": nics("eth0 10.0.0.1/24", "eth1 10.1.0.1/24")}
    assert choose([H1], have, reached={"h1": "10.1.0.1"}) == {"h1": ("10.1.0.1", "eth1")}
    assert choose([H1], have, reached={"h1": "203.0.113.5"}) == {"h1": ("127.0.0.1", "lo")}
    assert choose([H1], have) == choose([H1], {"h1": interfaces()}) == {"h1": ("127.0.0.1", "lo")}
    assert choose([H1], have, interface="eth1") == {"h1": ("10.1.0.1", "eth1")}
    assert choose([H1], {}) == {"h1": ("127.0.0.1", "")}


def test_one_machine_under_two_names():
    here = nics("eth0 10.0.0.1/24")
    said = refusal([H1, H2], {"h1": here, "h2": here}, reached={"h1": "10.0.0.1", "h2": "10.0.0.1"})
    assert "h1 and h2 have the same address, 10.0.0.1/24 on eth0" in said
    assert "slots=" in said and "addr=" in said
    assert "same address" in refusal([Host("h1", "127.0.0.1"), Host("h2", "127.0.0.1")], {"h1": here, "h2": here})


def test_a_hosts_own_interface_in_the_hosts_file():
    have = pair("eth0 10.1.0.1/24", "eth1 10.2.0.1/24")
    hosts = [Host("h1", interface="eth1"), Host("h2", interface="eth1")]
    assert choose(hosts, have) == {"h1": ("10.2.0.1", "eth1"), "h2": ("10.2.0.2", "eth1")}
    said = refusal([Host("h1", interface="eth9", where="hosts:1"), H2], have)
    assert said.startswith("hosts:1: interface eth9: no address of that interface on h1, which has 10.1.0.1/24 on eth0")
