"""Which process runs on which host, under every policy."""

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch import LaunchError
from launch.job.host import Host
from launch.job.placement import POLICIES, free, gpus_of, listing, place, spare_gpus
from launch.job.role import SCHEDULER, SERVER, WORKER

ROLE_SETS = [(), (), (), (WORKER,), (SERVER,), (SCHEDULER,), (SERVER, WORKER), (SCHEDULER, SERVER)]


def hosts(*attributes: dict) -> list[Host]:
    return [Host(f"h{number}", where=f"hosts:{number}", **each) for number, each in enumerate(attributes, 1)]


def plain(count: int, **attributes) -> list[Host]:
    return hosts(*[attributes] * count)


def names(placed, role: str) -> list[str]:
    return [host.name for each, _, host in placed if each == role]


def split(num_workers: int, num_servers: int, those: list[Host], policy: str) -> tuple[str, str, str]:
    """The host's numbers of scheduler, servers and workers."""
    placed = place(num_workers, num_servers, those, policy)
    return tuple("".join(name[1:] for name in names(placed, role)) for role in (SCHEDULER, SERVER, WORKER))


def refusal(*arguments) -> str:
    with pytest.raises(LaunchError) as caught:
        place(*arguments)
    assert caught.value.code == 2
    return str(caught.value)


@pytest.mark.parametrize("policy", ["dmlc", "pack", "spread"])
def test_on_one_host_everything_is_there_in_launch_order(policy):
    one = plain(1)
    order = [(SCHEDULER, 0), (SERVER, 0), (SERVER, 1), (WORKER, 0), (WORKER, 1), (WORKER, 2)]
    assert place(3, 2, one, policy) == [(*each, one[0]) for each in order]
    assert place(2, 0, one, policy) == [(WORKER, 0, one[0]), (WORKER, 1, one[0])]


W, S = {"roles": (WORKER,)}, {"roles": (SERVER,)}


@pytest.mark.parametrize(
    ("policy", "workers", "servers", "those", "expected"),
    [
        # dmlc: one round robin of servers and workers
        ("dmlc", 5, 5, plain(5), ("1", "12345", "12345")),
        ("dmlc", 3, 2, plain(2), ("1", "12", "121")),
        ("dmlc", 3, 1, plain(3), ("1", "1", "231")),  # the workers go on where the servers end
        ("dmlc", 4, 0, plain(3), ("", "", "1231")),
        ("dmlc", 5, 3, plain(3, slots=2), ("1", "123", "12312")),
        ("dmlc", 7, 3, hosts({"slots": 1}, {}, {"slots": 2}), ("1", "123", "1232322")),  # 1 is full, then 3
        ("dmlc", 3, 2, hosts(W, S, {}), ("3", "23", "131")),
        # the scheduler goes where roles name it
        ("dmlc", 1, 1, hosts({}, {"roles": (SCHEDULER,)}), ("2", "1", "1")),
        ("dmlc", 1, 1, hosts(W, S, {}), ("3", "2", "3")),
        ("dmlc", 1, 1, hosts(W, S), ("2", "2", "1")),
        ("dmlc", 1, 1, hosts({"slots": 1}), ("1", "1", "1")),
        # pack fills a host before the next
        ("pack", 5, 3, plain(3, slots=2), ("1", "112", "11223")),
        ("pack", 3, 3, hosts({"gpus": ("0", "1")}, {"cores": 8}), ("1", "112", "112")),
        ("pack", 6, 1, hosts({"slots": 1, "gpus": ("0", "1")}, {"cores": 8}), ("1", "1", "122222")),
        ("pack", 3, 2, hosts({"slots": 2, "roles": (WORKER,)}, {"slots": 2}), ("2", "22", "112")),
        ("pack", 4, 0, hosts({"slots": 4}, {}), ("", "", "1111")),  # what is not needed need not be known
        ("pack", 9, 9, hosts(S, W), ("1", "1" * 9, "2" * 9)),  # each has one host alone
        # spread deals each role from the first host
        ("spread", 2, 2, plain(5), ("1", "12", "12")),
        ("spread", 3, 1, plain(3), ("1", "1", "123")),
        ("spread", 5, 4, hosts({"slots": 1}, {}, {"slots": 2}), ("1", "1232", "12323")),
        ("spread", 3, 3, hosts(W, {}, {}), ("2", "232", "123")),
        # dedicated gives the servers the last hosts
        ("dedicated", 4, 1, plain(5), ("5", "5", "1234")),
        ("dedicated", 2, 2, plain(5), ("4", "45", "12")),
        ("dedicated", 5, 5, plain(5), ("4", "45454", "12312")),
        ("dedicated", 8, 2, plain(5), ("5", "55", "12341234")),
        ("dedicated", 3, 0, plain(2), ("", "", "121")),
        ("dedicated", 2, 4, plain(3, slots=2), ("2", "2323", "11")),
        ("dedicated", 2, 2, hosts(S, {}, {}), ("1", "11", "23")),
        ("dedicated", 2, 4, hosts(S, {}, {}), ("1", "1313", "22")),
        ("dedicated", 2, 1, hosts(S, {"roles": (SERVER, WORKER)}, {}), ("1", "1", "23")),
        ("dedicated", 9, 1, hosts(S, W), ("1", "1", "2" * 9)),
    ],
)
def test_where_each_policy_places_the_scheduler_servers_and_workers(policy, workers, servers, those, expected):
    assert split(workers, servers, those, policy) == expected


@given(st.integers(1, 30), st.integers(0, 30), st.integers(1, 9))
def test_dmlc_without_limits_is_the_formula_of_its_tracker(workers, servers, count):
    those = plain(count)
    placed = place(workers, servers, those)
    assert [host for role, _, host in placed if role != SCHEDULER] == [
        those[index % count] for index in range(servers + workers)
    ]


def test_the_listing_explains_each_policy():
    found = listing().split("), ")
    assert [each.partition(" (")[0] for each in found] == list(POLICIES)
    assert "pack (each role fills one host before the next" in found
    assert all(len(each.partition(" (")[2].split()) > 4 for each in found), found


HAVE = "the hosts have slots for"
EIGHT = "h1 1, h2 1, h3 1, h4 1, h5 1, h6 1, h7 1, h8 1"
PACK = "--placement pack: the number of workers that fill"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1, 1, []), "no host to run on"),
        ((1, 1, plain(1), "packed"), f"--placement packed: expected {listing()}"),
        ((5, 5, plain(4, slots=1)), f"-s 5: {HAVE} 4 servers: h1 1, h2 1, h3 1, h4 1; increase slots= or reduce -s"),
        ((3, 2, hosts({"slots": 2}, S)), f"-n 3: {HAVE} 2 workers: h1 2, h2 0;"),
        ((2, 1, plain(1, slots=1)), f"-n 2: {HAVE} 1 worker: h1 1; increase slots="),
        ((1, 11, plain(10, slots=1)), f"-s 11: {HAVE} 10 servers: {EIGHT}, and 2 more; increase"),  # a long list is cut
        ((1, 9, plain(8, slots=1)), f"-s 9: {HAVE} 8 servers: {EIGHT}; increase"),
        ((1, 1, plain(2, **W)), "-s 1: no host takes servers: h1 roles=worker, h2 roles=worker; add server to roles="),
        ((1, 0, plain(2), "pack"), f"{PACK} h1 (hosts:1) is unknown; set slots="),
        ((1, 0, [Host("h1"), Host("h2")], "pack"), f"{PACK} h1 is unknown; set slots=N or gpus="),  # in no hosts file
        (
            (5, 1, plain(2, gpus=("0", "1")), "pack"),
            "-n 5 --placement pack: the hosts take at most 4 workers: h1 2, h2 2; set slots=",
        ),
        ((1, 1, plain(1), "dedicated"), "--placement dedicated: 1 host cannot take 1 server on the last hosts"),
        ((5, 5, plain(5, slots=1), "dedicated"), "--placement dedicated: 5 hosts cannot take 5 servers"),
    ],
)
def test_jobs_that_do_not_fit_are_refused(arguments, message):
    assert refusal(*arguments).startswith(message)


HOSTS = st.lists(
    st.fixed_dictionaries(
        {
            "slots": st.one_of(st.none(), st.integers(1, 5)),
            "roles": st.sampled_from(ROLE_SETS),
            "gpus": st.sampled_from([(), ("0",), ("0", "1", "2")]),
            "cores": st.integers(1, 4),
        }
    ),
    min_size=1,
    max_size=6,
).map(lambda drawn: hosts(*drawn))


@given(st.integers(1, 12), st.integers(0, 12), HOSTS, st.sampled_from(sorted(POLICIES)))
def test_every_process_has_one_place_within_the_limits_of_its_host(num_workers, num_servers, those, policy):
    try:
        placed = place(num_workers, num_servers, those, policy)
    except LaunchError as error:
        assert not surely_fits(num_workers, num_servers, those, policy), error
        assert refusal(num_workers, num_servers, those, policy) == str(error)
        return
    ranks = [(SCHEDULER, 0)] * (num_servers > 0) + [(SERVER, rank) for rank in range(num_servers)]
    assert [each[:2] for each in placed] == ranks + [(WORKER, rank) for rank in range(num_workers)]
    for (role, host), count in Counter((role, host) for role, _, host in placed).items():
        if role != SCHEDULER:
            assert not host.roles or role in host.roles
            assert host.slots is None or count <= host.slots
    if policy == "dedicated":
        assert not set(names(placed, SERVER)) & set(names(placed, WORKER))
    assert place(num_workers, num_servers, those, policy) == placed


def surely_fits(num_workers: int, num_servers: int, those: list[Host], policy: str) -> bool:
    """Whether the policy must find a place for everything."""

    def room(role: str, some: list[Host]) -> float:
        able = [host for host in some if not host.roles or role in host.roles]
        return sum(float("inf") if host.slots is None else host.slots for host in able)

    if room(WORKER, those) < num_workers or room(SERVER, those) < num_servers:
        return False
    if policy in ("dmlc", "spread"):
        return True
    if policy == "pack":
        return not any(host.slots is None for host in those)
    limited = any(host.slots is not None or host.roles for host in those)
    return not num_servers or (len(those) > 1 and not limited)


@given(st.integers(1, 12), st.integers(0, 8), st.integers(1, 3))
def test_every_worker_of_a_host_gets_its_share_of_the_gpus(num_workers, num_gpus, num_hosts):
    gpus = tuple(map(str, range(num_gpus)))
    placed = place(num_workers, 0, plain(num_hosts, gpus=gpus))
    for host in {each[2] for each in placed}:
        ranks = [rank for _, rank, each in placed if each == host]
        shares = [gpus_of(placed, rank, host) for rank in ranks]
        if not gpus:
            assert set(shares) == {()}
        elif len(ranks) <= num_gpus:
            assert sum(shares, ()) == gpus
            assert max(map(len, shares)) - min(map(len, shares)) <= 1
        else:
            assert all(len(share) == 1 for share in shares)
            counts = Counter(shares)
            assert len(counts) == num_gpus
            assert max(counts.values()) - min(counts.values()) <= 1


def test_shares_of_gpus():
    def shares(num_workers: int, gpus: str) -> list[str]:
        those = hosts({"gpus": tuple(gpus)})
        placed = place(num_workers, 1, those)
        return ["".join(gpus_of(placed, rank, those[0])) for rank in range(num_workers)]

    assert shares(1, "0257") == ["0257"]
    assert shares(2, "0257") == ["02", "57"]
    assert shares(3, "0257") == ["0", "2", "57"]
    assert shares(4, "02") == ["0", "2", "0", "2"]


def test_how_many_more_workers_fit_on_a_host():
    assert free(Host("a"), 7) == math.inf
    assert free(Host("a", slots=2), 1) == 1
    assert free(Host("a", gpus=("0", "1")), 1) == 1 and free(Host("a", gpus=("0", "1")), 3) == -1
    assert free(Host("a", slots=4, gpus=("0", "1")), 1) == 3, "slots say that devices are shared"
    assert free(Host("a", roles=("server",)), 0) == 0


def test_a_worker_more_gets_the_devices_that_the_fewest_have():
    host = Host("a", gpus=("0", "1", "2", "3"))
    for taken, spare in (("", "0123"), ("01", "23"), ("0 1 3", "2"), ("0123", "01"), ("0 1 2 3 3", "0")):
        shares = [tuple(share) for share in taken.split()]
        assert spare_gpus(host, shares) == tuple(spare)
        assert spare_gpus(Host("a"), shares) == ()
