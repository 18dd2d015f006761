"""Which workers share a host, and sums by host."""

import itertools
import os
from functools import reduce
from operator import add

import numpy as np
import pytest

from dmltrain.kvstore import codec as codecs
from dmltrain.kvstore.server import summing
from dmltrain.kvstore.server.core import ServerCore
from dmltrain.kvstore.server.declared import Rejected
from dmltrain.kvstore.server.workers import relay_number
from dmltrain.kvstore.transport import host
from tests.kvstore.carrying_out import push, pushed
from tests.kvstore.made import declaration, start
from tests.kvstore.through_a_codec import encode

HOSTS = ((0, 2), (1,), (3, 4, 5))
LENGTH = 2 * summing.BLOCK + 3


def gradients():
    return np.random.default_rng(1).standard_normal((6, LENGTH)).astype(np.float32)


def by_host(values, hosts=HOSTS):
    """The sum of the hosts' sums, each in order."""
    return reduce(add, [reduce(add, [values[rank] for rank in ranks]) for ranks in hosts])


def test_workers_are_grouped_by_host_in_the_order_of_their_lowest_rank():
    """Processes of one network namespace have one identity."""
    assert host.of_workers(["b", "a", "b", "", "a", ""]) == ((0, 2), (1, 4), (3,), (5,))
    assert host.identity() == host.identity() != ""
    assert str(os.stat("/proc/self/ns/net").st_ino) in host.identity()


@pytest.mark.parametrize(
    "workers, servers, expected",
    [
        ([["a", "x"], ["b", "y"], ["a", "z"]], ["a", "b"], [((0, 2), [1]), ((), []), ((0, 2), [1])]),
        ([["a", "x"], ["a", "y"]], ["a"], [((), []), ((), [])]),  # shared memory reaches the server
        ([["a", "x"], ["a", "y"]], ["b"], [((0, 1), [0]), ((0, 1), [0])]),
        ([["a", "x"], ["a", ""]], ["b"], [((), []), ((), [])]),  # worker 1 cannot be met, or does not want to
        ([["", "x"], ["", "y"]], ["b"], [((), []), ((), [])]),
    ],
)
def test_a_host_sums_for_servers_of_other_hosts(workers, servers, expected):
    start_message = start(workers, [("10.0.0.1", 9, "m", name) for name in servers])
    assert [host.relayed(start_message, rank) for rank in range(len(workers))] == expected


@pytest.mark.parametrize(
    "workers, servers, expected",
    [
        (["a", "b"], ["c", "d"], True),
        (["a", "a"], ["c"], True),
        (["a", "b"], ["c", "b"], False),  # some of the answers stay on their host
        (["a", ""], ["c"], False),  # not known
        (["a"], [""], False),
    ],
)
def test_servers_are_apart_if_none_is_known_to_be_on_a_host_with_workers(workers, servers, expected):
    message = start([[name, "x"] for name in workers], [("10.0.0.1", 9, "m", name) for name in servers])
    assert host.apart(message) is expected


@pytest.mark.parametrize("into", [None, 0, 1])
@pytest.mark.parametrize(
    "hosts", [HOSTS, ((0,), (1, 2), (3, 4, 5)), ((0, 1, 2), (3,)), ((0, 1),), ((0,), (1,)), ((0,),)]
)
def test_hosts_are_summed_in_order_for_any_destination_of_the_sum(hosts, into):
    values = gradients()
    parts = [[values[rank].copy() for rank in ranks] for ranks in hosts]
    every = list(itertools.chain(*parts))
    out = np.full(LENGTH, np.nan, np.float32) if into is None else every[into % len(every)]
    summing.total(parts, out)
    assert out.tobytes() == by_host(values, hosts).tobytes()


def core_of(workers=6, hosts=HOSTS, length=LENGTH, **compression):
    """One key."""
    made = ServerCore(workers, wait_seconds=60.0)
    made.on_hosts(hosts)
    made.declare(0, declaration(sizes=(length,), **compression))
    return made


@pytest.mark.parametrize("relays", [(), (0,), (3,), (0, 3)])
@pytest.mark.parametrize("backwards", [False, True])
def test_a_relay_pushes_for_its_whole_host_with_the_same_bits(relays, backwards):
    """Relays are known by the lowest rank of their host."""
    values, server, pushes = gradients(), core_of(), []
    for ranks in HOSTS:
        if ranks[0] in relays:
            total = np.empty(LENGTH, np.float32)
            summing.total([[values[rank] for rank in ranks]], total)
            pushes.append((relay_number(6, ranks[0]), total))
        else:
            pushes += [(rank, values[rank]) for rank in ranks]
    numbers = [number for number, _ in pushes]
    for number in numbers:
        server.pull(number, 0, 0, 1)
    replies = [
        reply for number, data in (pushes[::-1] if backwards else pushes) for reply in push(server, number, 0, 1, data)
    ]
    assert sorted(reply.worker for reply in replies) == sorted(numbers)
    assert replies[0].buffer.array.tobytes() == by_host(values).tobytes()


def test_a_host_pushes_through_its_relay_or_directly_but_not_both():
    """Until it does, all its workers are named as missing."""
    server, values = core_of(), gradients()
    for rank in (0, 1, 2):
        push(server, rank, 0, 1, values[rank], now=100.0)
    assert "for worker 3, 4, 5 " in server.overdue(161.0)
    push(server, 4, 0, 1, values[4])
    with pytest.raises(Rejected, match="a push is missing"):
        push(server, relay_number(6, 3), 0, 1, values[3])
    assert not server.workers.takes(relay_number(6, 1)), "a worker alone has no relay"


def test_a_connected_relay_reports_workers_that_finish_early():
    server, values = core_of(), gradients()
    server.workers.join(relay_number(6, 3))
    push(server, 1, 0, 1, values[1])
    server.finish(4)  # its last push may still be in its host's sum
    assert server.overdue(1.0) == server.overdue(2.0) == ""
    server.finish(relay_number(6, 3))
    assert server.overdue(3.0) == ""
    assert "worker 4 has finished already" in server.overdue(4.0)


def test_times_of_relayed_values_exclude_the_transfer():
    """Of 9 s since worker 0's push: 2 s until worker 2's, 3 s for other hosts, 1 s of work; 3 s of transfer."""
    relay = core_of(hosts=[(0, 2)], length=1)
    (work,) = pushed(relay, 0, 0, 1, [1], now=100.0) + pushed(relay, 2, 0, 1, [1], now=102.0)
    work.run()
    relay.pull(0, 0, 0, 1)
    (reply,) = relay.done(work, 109.0, waited=3.0, worked=1.0)
    assert (reply.waited, reply.worked) == (5.0, 1.0)


def test_a_hosts_2bit_sum_is_decoded_with_its_own_threshold():
    """Two workers' sum is sent in steps of two thresholds (two_bits.py); worker 1's push beside it in its own."""
    spec, works = {"type": "2bit", "threshold": 0.5}, []
    server = core_of(3, [(0, 2), (1,)], 4, compression=spec)
    for number, workers, values in ((relay_number(3, 0), 2, [1, -1, 1, 0]), (1, 1, [0.5, -0.5, 0, 0.5])):
        codec = codecs.make(spec).of_sum(workers)
        works += pushed(server, number, 0, 1, (encode(codec, np.array(values, np.float32)), codec.number))
    (work,) = works
    work.run()
    assert work.target.array.tolist() == [1.5, -1.5, 1.0, 0.5]
