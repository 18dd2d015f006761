"""The steps before a job's first process, on the bare state machine: what hosts say in, actions and problems out."""

from dataclasses import replace

import pytest

from dmltrain_launch import LaunchError
from dmltrain_launch.agent.commands import Bind, Measure, Peer, Probe, Reach
from dmltrain_launch.agent.events import Bound, Measured, Probed, Reached, Ready
from dmltrain_launch.job.host import Host, Machine
from dmltrain_launch.job.job import Job
from dmltrain_launch.job.task import Ports
from dmltrain_launch.preflight import request
from dmltrain_launch.run.supervisor.action import Action, Connect, Copy, Send
from dmltrain_launch.run.supervisor.event import Copied
from dmltrain_launch.run.supervisor.prepare import Preparation

LOCAL = Job("name", "mark", ("true",), 2, 1, "/work")
FAR = replace(LOCAL, over_network=True)
PORTS = {"scheduler": 9000, "master": 9001, "reach": 9002, "throughput": 9003}


def hosts(names: str) -> list[Host]:
    return [Host(name) for name in names]


def facts(number: int, **more: object) -> dict:
    """What a host finds, whose address is 10.0.0.`number`."""
    row = {"name": "eth1", "address": f"10.0.0.{number}", "prefix": 24, "loopback": False, "running": True}
    return {"interfaces": [row], **more}


class Course:
    """A preparation, and what all hosts have said so far."""

    def __init__(self, job: Job = FAR, names: str = "ab", check: bool = False, **of_each_host: object):
        self.names = names
        self.preparation = Preparation(job, [replace(host, **of_each_host) for host in hosts(names)], check)

    def connect(self) -> list[Action]:
        return self.say(*(Ready(name, 10, 4, "/usr/bin/python3") for name in self.names))

    def probe(self, **found: dict) -> list[Action]:
        """`found` are facts of hosts by name, besides their addresses."""
        known = ((name, facts(number, **found.get(name, {}))) for number, name in enumerate(self.names, 1))
        return self.say(*(Probed(name, each) for name, each in known))

    def bind(self) -> list[Action]:
        return self.say(*(Bound(name, dict(PORTS)) for name in self.names))

    def reach(self, **lost: str) -> list[Action]:
        """Every host reaches every other one, but a the hosts in lost["a"]."""
        cut, good = {"error": "timed out"}, {"ms": 0.1}
        found = {
            name: {peer: cut if peer in lost.get(name, "") else good for peer in self.names if peer != name}
            for name in self.names
        }
        return self.say(*(Reached(name, peers) for name, peers in found.items()))

    def ready_to_reach(self) -> "Course":
        self.connect()
        self.probe()
        self.bind()
        return self

    def say(self, *events) -> list[Action]:
        """What the last of them leads to: all others lead to nothing."""
        *others, last = [self.preparation.handle(event) for event in events]
        assert not any(others), others
        return last


def pairs(actions: list[Action]) -> set[frozenset[str]]:
    """Who measures with whom."""
    assert all(isinstance(action.command, Measure) for action in actions)
    return {frozenset((action.host, action.command.peer.name)) for action in actions}


def test_the_steps_on_hosts_of_a_network_with_a_copy():
    course = Course(replace(FAR, copy_to="/copy"))
    preparation = course.preparation
    assert preparation.begin() == [Connect("a"), Connect("b")]
    assert (preparation.step, preparation.waiting) == ("connect", "a, b (connecting)")
    assert preparation.waiting_for == {"a", "b"}
    assert course.connect() == [Copy("a", "/copy"), Copy("b", "/copy")]
    assert preparation.waiting == "a, b (copying)"
    asked = course.say(Copied("a", "all"), Copied("b", "all"))
    assert asked == [Send(host.name, Probe(request(preparation.job, host))) for host in preparation.hosts.values()]
    assert preparation.waiting == "a, b (checking the host)"
    binds = Bind("10.0.0.1", reach=True, scheduler=0), Bind("10.0.0.2", reach=True, master=0)
    assert course.probe() == [Send("a", binds[0]), Send("b", binds[1])]
    assert preparation.waiting == "a, b (binding ports)"
    a, b = Peer("a", "10.0.0.1", 9002), Peer("b", "10.0.0.2", 9002)
    assert course.bind() == [Send("a", Reach((b,))), Send("b", Reach((a,)))]
    assert preparation.waiting == "a, b (connecting to the other hosts)" and not preparation.done
    assert course.reach() == []
    assert preparation.done and (preparation.step, preparation.waiting, preparation.waiting_for) == ("", "", set())
    found = [(host.address, host.interface) for host in preparation.hosts.values()]
    assert found == [("10.0.0.1", "eth1"), ("10.0.0.2", "eth1")]


@pytest.mark.parametrize("check", [False, True])
def test_this_machine_alone_is_not_reached_and_only_a_check_looks_at_it(check):
    course = Course(LOCAL, "a", check=check, address="127.0.0.1")
    asked = course.connect()
    if check:
        assert isinstance(asked[0].command, Probe)
        asked = course.probe()
    assert asked == [Send("a", Bind("127.0.0.1", scheduler=0, master=0))]
    assert course.bind() == [] and course.preparation.done, "and measures nothing"


def test_ports_are_held_where_the_first_processes_of_the_roles_are():
    hosts_by_role = [Host("a", roles=("server",)), Host("b", roles=("worker",)), Host("c", roles=("scheduler",))]
    course = Course(replace(FAR, port=777), "abc")
    course.preparation = Preparation(course.preparation.job, hosts_by_role)
    course.connect()
    assert course.probe() == [
        Send("a", Bind("10.0.0.1", reach=True)),
        Send("b", Bind("10.0.0.2", reach=True, master=0)),
        Send("c", Bind("10.0.0.3", reach=True, scheduler=777)),
    ]
    ports = {"a": {}, "b": {"master": 2}, "c": {"scheduler": 777}}
    course.say(*(Bound(name, {"reach": 1, **port}) for name, port in ports.items()))
    assert course.preparation.chosen_ports == Ports(scheduler=777, master=2)


@pytest.mark.parametrize(
    ("more", "bind", "bound", "ports"),
    [
        ({"num_servers": 0}, {"master": 0}, {"master": 5}, Ports(0, 5)),
        ({"torch_env": False}, {"scheduler": 0}, {"scheduler": 6}, Ports(6, 0)),
    ],
)
def test_unused_ports_are_not_bound(more, bind, bound, ports):
    course = Course(replace(LOCAL, **more), "a", address="127.0.0.1")
    assert course.connect() == [Send("a", Bind("127.0.0.1", **bind))]
    course.say(Bound("a", bound))
    assert course.preparation.chosen_ports == ports


def test_what_agents_have_found_out_is_in_their_hosts():
    course = Course(LOCAL, "abc", address="127.0.0.1")
    machine = {"boot_id": "b", "cpus": [2, 3], "limits": {"/": 1.5}}
    assert course.say(Ready("a", 10, 4, "/usr/bin/python3", machine=machine)) == []
    course.say(Ready("b", 10, 1, "/opt/python"), Ready("c", 10, 2))
    found = [(host.cores, host.python, host.machine) for host in course.preparation.hosts.values()]
    first = (4, "/usr/bin/python3", Machine("b", (2, 3), (("/", 1.5),)))
    assert found == [first, (1, "/opt/python", None), (2, "", None)]
    (probe,) = Course(names="a", python="/opt/mine").connect()
    assert probe.command.request["python"] == "/opt/mine", "what was given for a host is what is probed"


def test_problems_of_all_hosts_are_raised_together_with_the_first_code():
    course = Course(names="abc")
    course.connect()
    gone = {"workdir": {"path": "/work", "exists": False, "writable": False}}
    secret = {"script": {"path": "x.py", "exists": True, "readable": False}}
    with pytest.raises(LaunchError) as caught:
        course.probe(a=gone, c=secret)
    first, second = str(caught.value).splitlines()
    assert first.startswith("a: the working directory /work does not exist; ")
    assert second.startswith("c: script x.py cannot be read")
    assert caught.value.code == 127, "of the first"


def test_warnings_are_kept_and_do_not_stop_the_job():
    course = Course()
    course.connect()
    versions = {name: {"inspection": inspection(torch)} for name, torch in (("a", "2.1"), ("b", "2.2"))}
    full = {"disk": {"/tmp": 1}}
    assert len(course.probe(a={**versions["a"], **full}, b=versions["b"])) == 2
    texts = [problem.text for problem in course.preparation.problems]
    assert [text.partition(":")[0] for text in texts] == ["a", "hosts have different versions of torch"], texts


def inspection(torch: str) -> dict:
    return {"executable": "python3", "version": "3.12.1", "missing": [], "local": [], "packages": {"torch": torch}}


def test_a_clock_that_is_wrong_is_a_warning():
    course = Course()
    course.connect()
    course.say(Probed("a", facts(1), skew=0.1), Probed("b", facts(2), skew=-3.0))
    (problem,) = course.preparation.problems
    assert problem.text.startswith("b: its clock is 3.0 s behind")


def at(*addresses: str, **more: object) -> list[dict]:
    """Rows of interfaces."""
    return [{**facts(1)["interfaces"][0], "address": address, **more} for address in addresses]


def test_hosts_without_a_network_in_common_have_no_addresses():
    apart = Probed("b", {"interfaces": [*at("10.9.0.1"), *facts(2)["interfaces"]]})
    course = Course(replace(FAR, subnet="10.9.0.0/24"))
    course.connect()
    with pytest.raises(LaunchError, match="subnet 10.9.0.0/24"):
        course.say(Probed("a", facts(1)), apart)
    check = Course(replace(FAR, subnet="10.9.0.0/24"), check=True)
    check.connect()
    assert check.say(Probed("a", facts(1)), apart) == [], "the check has found all that it can"
    assert check.preparation.done and not check.preparation.waiting
    (problem,) = check.preparation.problems
    assert problem.host == "" and problem.code == 2 and "--subnet 10.9.0.0/24" in problem.message


def test_the_address_is_the_one_that_ssh_reached_or_of_the_interface_that_was_asked_for():
    course = Course(interface="")
    course.say(Ready("a", 10, 4, reached="10.1.0.1"), Ready("b", 10, 4, reached="10.2.0.1"))
    asked = course.say(
        *(Probed("ab"[each - 1], {"interfaces": at(f"10.{each}.0.1", f"10.{each}0.0.1")}) for each in (1, 2))
    )
    assert [each.command.address for each in asked] == ["10.1.0.1", "10.2.0.1"]
    course = Course(replace(FAR, interface="ib0"), "a")
    course.connect()
    (asked,) = course.say(Probed("a", {"interfaces": [*at("10.0.0.1"), *at("10.7.0.1", name="ib0")]}))
    assert asked.command.address == "10.7.0.1" and course.preparation.hosts["a"].interface == "ib0"


def test_hosts_that_do_not_reach_each_other_do_not_start():
    course = Course(names="abc").ready_to_reach()
    with pytest.raises(LaunchError) as caught:
        course.reach(a="c", b="a")
    assert [line.partition(":")[0] for line in str(caught.value).splitlines()] == ["a", "b"]
    assert "a: cannot reach c at 10.0.0.3" in str(caught.value)


def test_a_check_collects_all_problems_and_continues():
    course = Course(names="ab", check=True)
    course.connect()
    asked = course.probe(a={"workdir": {"path": "/work", "exists": False, "writable": False}})
    assert [each.command for each in asked] == [
        Bind("10.0.0.1", reach=True, throughput=True, scheduler=0),
        Bind("10.0.0.2", reach=True, throughput=True, master=0),
    ]
    course.bind()
    course.reach(b="a")
    assert [problem.host for problem in course.preparation.problems] == ["a", "b"]


def test_a_check_continues_without_a_lost_host():
    course = Course(names="abc", check=True)
    preparation = course.preparation
    assert preparation.handle(Ready("a", 10, 4)) == []
    assert preparation.leave_out("a", "a: no route to host", 2) == []
    assert preparation.waiting_for == {"b", "c"}
    assert preparation.handle(Ready("b", 10, 4)) == []
    probes = preparation.leave_out("c", "c: no such name", 125)
    assert [probe.host for probe in probes] == ["b"] and list(preparation.hosts) == ["b"]
    found = [(problem.host, problem.message, problem.code) for problem in preparation.problems]
    assert found == [("a", "a: no route to host", 2), ("c", "c: no such name", 125)]
    (bind,) = preparation.handle(Probed("b", facts(2)))
    assert bind.command.reach is bind.command.throughput is False, "nobody is left to reach it"


def test_two_hosts_measure_once():
    course = Course(check=True).ready_to_reach()
    (asked,) = course.reach()
    assert asked == Send("a", Measure(Peer("b", "10.0.0.2", 9003)))
    assert course.preparation.waiting == "a (measuring the throughput)"
    assert course.say(Measured("a", "b", out=5.0, back=7.0)) == [], "there is no other pair to be slower than"
    assert course.preparation.done
    assert course.preparation.throughput.measured == {"a": {"b": {"speed": 5.0}}, "b": {"a": {"speed": 7.0}}}


@pytest.mark.parametrize("way", ["ab", "ba"])
def test_a_path_that_is_cut_in_one_direction_is_not_measured(way):
    """Also where a host says nothing of a peer."""
    course = Course(check=True).ready_to_reach()
    assert course.reach(**{way[0]: way[1]}) == [] and course.preparation.done
    course = Course(check=True).ready_to_reach()
    assert course.say(Reached(way[0], {way[1]: {"ms": 0.1}}), Reached(way[1], {})) == []
    assert course.preparation.done and not course.preparation.throughput.measured


def test_pairs_that_share_no_host_measure_side_by_side():
    course = Course(names="abcd", check=True).ready_to_reach()
    asked = course.reach()
    seen = []
    while not course.preparation.done and len(seen) < 9:
        seen.append(pairs(asked))
        speed = 1.0 if frozenset("bd") in seen[-1] else 9.0
        asked = course.say(*(Measured(each.host, each.command.peer.name, out=speed, back=speed) for each in asked))
    assert [len(each) for each in seen] == [2, 2, 2, 1]
    assert len(set().union(*seen)) == 6 and seen[-1] < next(each for each in seen if frozenset("bd") in each)
