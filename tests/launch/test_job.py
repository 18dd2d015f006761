"""Which process runs where, with which argv and environment, under every policy of placement."""

import math
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmltrain_launch import LaunchError
from dmltrain_launch.agent.host_job import share_of_gpus, with_share
from dmltrain_launch.channels.bridges.bridge import visible_gpus
from dmltrain_launch.job.host import Host
from dmltrain_launch.job.job import OWNED, WIRES, Job, Setting, host_of, placements, with_workers_for, workdir_of
from dmltrain_launch.job.placement import POLICIES, free_slots, gpus_of, listing, place, spare_gpus
from dmltrain_launch.job.role import SCHEDULER, SERVER, WORKER
from dmltrain_launch.job.task import Ports, replacement, successor, tasks
from tests.launch.refusal import refusal

ONE = [Host("localhost", "127.0.0.1", "/usr/bin/python3", cores=8)]
TWO = [Host("a", "10.0.0.1", "python3", cores=4), Host("b", "10.0.0.2", "/opt/python", cores=6)]
PORTS = Ports(9000, 9001)


def job(argv=("train.py", "x"), workers=2, servers=2, **more) -> Job:
    return Job("name", "mark", tuple(argv), workers, servers, "/work", **more)


def environments(made: Job, hosts: list[Host] = ONE, ports: Ports = PORTS) -> dict[str, dict[str, str]]:
    """The environment of each process of the job, by its name."""
    return {task.name: task.environment for task in tasks(made, hosts, ports)}


@pytest.mark.parametrize(
    ("slots", "gpus", "number"), [(None, (), 2), (1, (), 2), (2, (), 4), (7, (), 8), (None, ("0", "1", "2"), 6)]
)
def test_as_many_workers_as_there_is_room_for(slots, gpus, number):
    elastic = job(workers=2, elastic=2, most_workers=8, over_network=True)
    assert with_workers_for(elastic, [replace(host, slots=slots, gpus=gpus) for host in TWO]).num_workers == number
    assert with_workers_for(replace(elastic, over_network=False), ONE).num_workers == 8


def test_as_many_workers_as_the_placement_leaves_room_for():
    elastic = job(workers=2, servers=1, elastic=2, most_workers=8, placement="dedicated", over_network=True)
    hosts = [Host(name, slots=2) for name in "abc"]
    assert with_workers_for(elastic, hosts).num_workers == 4, "c has the server"
    with pytest.raises(LaunchError, match="-n 2: the hosts have slots for 1 worker"):
        placements(with_workers_for(elastic, [Host("a", slots=1)]), [Host("a", slots=1)])


def test_places_on_two_hosts():
    found = environments(job(workers=3), TWO)
    assert found["worker-0"]["MASTER_ADDR"] == found["worker-1"]["MASTER_ADDR"] == "10.0.0.1"
    assert [found[f"worker-{rank}"]["LOCAL_RANK"] for rank in range(3)] == ["0", "1", "0"]
    assert [found[f"worker-{rank}"]["LOCAL_WORLD_SIZE"] for rank in range(3)] == ["2", "2", "1"]
    assert [found[f"worker-{rank}"]["GROUP_RANK"] for rank in range(3)] == ["0", "0", "1"]
    assert [found[f"worker-{rank}"]["NODE_RANK"] for rank in range(3)] == ["0", "0", "1"]
    assert {found[f"worker-{rank}"]["GROUP_WORLD_SIZE"] for rank in range(3)} == {"2"}
    assert [found[f"worker-{rank}"]["OMP_NUM_THREADS"] for rank in range(3)] == ["2", "2", "6"]
    assert found["worker-2"]["DMLC_NODE_HOST"] == "10.0.0.2"
    assert {(each["DMLC_PS_ROOT_URI"], each["DMLC_PS_ROOT_PORT"]) for each in found.values()} == {("10.0.0.1", "9000")}


def test_workers_are_numbered_host_by_host_if_torch_is_to_know_their_numbers():
    """As torchrun numbers them; else in the order of the tracker of dmlc. The same processes run on the same hosts."""
    hosts = [Host("server", roles=(SERVER,)), *TWO]
    for torch_env, names in ((True, "aabb"), (False, "abab")):
        placed = placements(job(workers=4, servers=1, torch_env=torch_env), hosts)
        assert "".join(host.name for role, _, host in placed if role == WORKER) == names
        assert [rank for role, rank, _ in placed if role == WORKER] == [0, 1, 2, 3]
        assert [host.name for role, _, host in placed if role != WORKER] == ["a", "server"]


def test_the_whole_environment_of_each_role():
    hosts = [replace(TWO[0], interface="eth1"), TWO[1]]
    found = environments(job(workers=1, servers=2, restart=3), hosts, Ports(90, 91))

    def variables(text: str) -> dict[str, str]:
        return dict(word.split(":", 1) for word in text.split())

    common = variables(
        "DMLC_NUM_WORKER:1 DMLC_NUM_SERVER:2 DMLC_PS_ROOT_URI:10.0.0.1 DMLC_PS_ROOT_PORT:90 DMLTRAIN_JOB:mark "
        "DMLTRAIN_RESTART:3 PYTHONUNBUFFERED:1 PYTHONFAULTHANDLER:1"
    )
    a = variables(
        "DMLC_NODE_HOST:10.0.0.1 DMLTRAIN_HOST_NAME:a DMLC_INTERFACE:eth1 NCCL_SOCKET_IFNAME:=eth1 "
        "GLOO_SOCKET_IFNAME:eth1"
    )
    b = variables("DMLC_NODE_HOST:10.0.0.2 DMLTRAIN_HOST_NAME:b")
    worker = variables(
        "DMLC_ROLE:worker DMLC_WORKER_ID:0 DMLC_TASK_ID:0 OMP_NUM_THREADS:4 MASTER_ADDR:10.0.0.1 MASTER_PORT:91 "
        "RANK:0 WORLD_SIZE:1 LOCAL_RANK:0 LOCAL_WORLD_SIZE:1 GROUP_RANK:0 GROUP_WORLD_SIZE:1 NODE_RANK:0"
    )
    server = variables("DMLC_ROLE:server DMLC_SERVER_ID:1 DMLC_TASK_ID:1 OMP_NUM_THREADS:1")
    assert found["scheduler-0"] == common | a | variables("DMLC_ROLE:scheduler DMLC_TASK_ID:0 OMP_NUM_THREADS:1")
    assert found["server-1"] == common | b | server
    assert found["worker-0"] == common | a | worker


def test_what_tells_a_process_its_role_is_never_inherited():
    """From a job around this one, say; the user's own defaults and devices are."""
    overridable = {"OMP_NUM_THREADS", "PYTHONUNBUFFERED", "PYTHONFAULTHANDLER"}
    made = tasks(job(wire="tls", elastic=1, wait_for_hosts=5.0, restart_servers=1), ONE, Ports())
    replaced = replacement(job(), made[-1], ONE[0], made, (), Ports())
    next_one = successor(job(), made[0], ONE[0], made, made[-1:], Ports(incarnation=2))
    told = {name for task in (*made, replaced, next_one) for name in task.environment} - overridable
    by_the_agent = {"DMLTRAIN_KEY_FILE", "DMLTRAIN_CERTIFICATE_FILE", "DMLTRAIN_LISTEN_FD", "DMLTRAIN_AGENT"}
    by_the_agent |= {"DMLTRAIN_SCHEDULER_FILE", "DMLTRAIN_AGENT_FD"}
    told |= {"DMLTRAIN_STRAGGLERS"}
    assert set(OWNED) == told | by_the_agent


def test_all_processes_get_the_level_of_protection_and_know_how_many_workers_an_elastic_job_needs():
    for level in WIRES:
        assert {
            environment.get("DMLTRAIN_WIRE", "plain") for environment in environments(job(wire=level)).values()
        } == {level}
    assert {environment["DMLTRAIN_ELASTIC"] for environment in environments(job(elastic=2)).values()} == {"2"}
    assert not any("DMLTRAIN_ELASTIC" in environment for environment in environments(job()).values())


def test_without_servers_there_is_no_scheduler_to_name_and_without_ddp_no_variable_of_torch():
    (name,) = found = environments(job(workers=1, servers=0))
    assert name == "worker-0" and found[name]["DMLC_NUM_SERVER"] == "0"
    assert not [each for each in found[name] if each.startswith("DMLC_PS_ROOT")]
    torchs = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"}
    assert torchs <= found[name].keys()
    assert not torchs & environments(job(workers=1, servers=0, torch_env=False))[name].keys()


def test_workers_share_the_gpus_of_their_host_and_no_other_role_is_restricted():
    found = environments(job(workers=4), [replace(TWO[0], gpus=("0", "2", "5")), TWO[1]])
    visible = {name: each["CUDA_VISIBLE_DEVICES"] for name, each in found.items() if "CUDA_VISIBLE_DEVICES" in each}
    assert visible == {"worker-0": "0", "worker-1": "2,5"}


def test_a_replacement_on_the_same_host_differs_from_the_lost_worker_only_in_that_it_joins():
    made = tasks(job(elastic=1), TWO, Ports(9000, 9001))
    lost = made[-1]
    found = replacement(job(elastic=1), lost, lost.host, made, made[:-1], Ports(9000, 9001))
    assert found == replace(lost, environment={**lost.environment, "DMLTRAIN_JOIN": "1"})
    assert not any("DMLTRAIN_JOIN" in each.environment for each in made)


def test_a_replacement_on_another_host_gets_what_it_would_have_had_there():
    hosts = [replace(TWO[0], gpus=("0", "1"), environment=(("HERE", "a"),)), replace(TWO[1], gpus=("4", "5", "6", "7"))]
    elastic = job(workers=4, elastic=1)
    made = tasks(elastic, hosts, Ports(9000, 9001))
    lost, other = [each for each in made if each.role == WORKER and each.host.name == "b"]
    first = next(each for each in made if each.name == "worker-0")
    found = replacement(elastic, lost, hosts[0], made, [first, other], Ports(9000, 9001)).environment
    assert found["CUDA_VISIBLE_DEVICES"] == "1", "of worker 2, which no longer runs there"
    assert (found["DMLTRAIN_HOST_NAME"], found["DMLC_NODE_HOST"], found["HERE"]) == ("a", "10.0.0.1", "a")
    same = ["DMLC_WORKER_ID", "DMLC_TASK_ID", "DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT", "RANK", "MASTER_ADDR"]
    assert {name: found[name] for name in same} == {name: lost.environment[name] for name in same}
    assert found["OMP_NUM_THREADS"] == "1", "three workers share four cores"
    assert found["DMLTRAIN_JOIN"] == "1" and found.keys() - lost.environment.keys() == {"DMLTRAIN_JOIN", "HERE"}


def test_worker_0_may_move_though_the_others_were_given_its_address():
    made = tasks(job(), TWO, Ports(9000, 9001))
    lost = next(each for each in made if each.name == "worker-0")
    found = replacement(job(), lost, TWO[1], made, [made[-1]], Ports(9000, 9001))
    assert found.environment["MASTER_ADDR"] == "10.0.0.1" and found.argv[0] == "/opt/python"


def test_where_the_processes_of_a_host_run():
    assert workdir_of(job(), ONE[0]) == "/work"
    assert workdir_of(job(copy_to="/copy"), ONE[0]) == "/copy"
    assert workdir_of(job(copy_to="/copy"), replace(ONE[0], workdir="/data")) == "/data"


def test_the_host_of_the_first_process_of_a_role():
    hosts = [replace(TWO[0], roles=("worker",)), TWO[1]]
    assert [host_of(job(), hosts, role).name for role in (SCHEDULER, SERVER, WORKER)] == ["b", "b", "a"]
    assert host_of(job(servers=0), hosts, SCHEDULER) is None


def test_values_that_are_never_shown_come_from_the_job_and_from_its_hosts():
    settings = (Setting("PLAIN", "seen-by-all"), Setting("MARKED", "told-to-hide", secret=True))
    hosts = [replace(ONE[0], environment=(("API_TOKEN", "a-token-of-a-host"), ("COLOUR", "blue-and-green")))]
    assert set(job(settings=settings).secrets(hosts)) == {"told-to-hide", "a-token-of-a-host"}


def test_a_bare_script_gets_each_hosts_python():
    found = [task.argv for task in tasks(job(servers=0), TWO, Ports())]
    assert found == [("python3", "train.py", "x"), ("/opt/python", "train.py", "x")]
    assert tasks(job(("python", "train.py"), servers=0), ONE, Ports())[0].argv == ("python", "train.py")


def test_threads_of_a_host_are_shared_by_its_workers():
    found = {name: environment["OMP_NUM_THREADS"] for name, environment in environments(job(workers=3)).items()}
    assert list(found.values()) == ["1", "1", "1", "2", "2", "2"]
    assert list(found) == ["scheduler-0", "server-0", "server-1", "worker-0", "worker-1", "worker-2"]
    crowded = environments(job(workers=20, servers=0)).values()
    assert {each["OMP_NUM_THREADS"] for each in crowded} == {"1"}


def test_settings_win_but_not_over_the_contract_and_those_of_a_host_win_over_those_of_the_job():
    """What the hosts file says of one host (env.NAME=) is more special than --env, which is for all."""
    settings = (Setting("OMP_NUM_THREADS", "5"), Setting("A", "all"), Setting("A", "w", "worker"), Setting("RANK", "9"))
    found = environments(job(settings=settings))
    assert found["worker-1"]["OMP_NUM_THREADS"] == found["server-0"]["OMP_NUM_THREADS"] == "5"
    assert (found["worker-1"]["A"], found["server-1"]["A"], found["worker-1"]["RANK"]) == ("w", "all", "1")
    host = replace(ONE[0], environment=(("OMP_NUM_THREADS", "7"), ("A", "host"), ("DMLC_ROLE", "none")))
    for name, told in environments(job(settings=(*settings, Setting("B", "job"))), [host]).items():
        seen = told["OMP_NUM_THREADS"], told["A"], told["B"], told["DMLC_ROLE"]
        assert seen == ("7", "host", "job", name.partition("-")[0])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"argv": ()}, "no program given"),
        ({"workers": 0}, "num-workers is 0: expected 1 or more"),
        ({"servers": -1}, "num-servers is -1: expected 0 or more"),
        ({"port": 65536}, "--port is 65536"),
        ({"port": -1}, "--port is -1"),
    ],
)
def test_a_job_is_checked_when_made(wrong, message):
    with pytest.raises(LaunchError, match=message):
        job(**wrong)
    assert job(workers=1, servers=0, port=65535).port == 65535, "the least job and the last port"


# -- GPUs that the host alone knows ----------------------------------------------------------------------------------


def local_worker(local: int, workers: int) -> dict[str, str]:
    return {"LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(workers)}


@pytest.mark.parametrize("workers", range(1, 8))
@pytest.mark.parametrize("devices", [(), ("0",), ("0", "1", "4"), ("GPU-a", "GPU-b", "GPU-c", "GPU-d", "GPU-e")])
def test_workers_share_as_with_gpus_in_a_hosts_file(workers: int, devices: tuple[str, ...]):
    host = Host("h1", gpus=devices)
    placed = [(WORKER, rank, host) for rank in range(workers)]
    for rank in range(workers):
        expected = gpus_of(placed, rank, host)
        found = share_of_gpus(",".join(devices), local_worker(rank, workers))
        assert found == ({"CUDA_VISIBLE_DEVICES": ",".join(expected)} if expected else {})


def test_the_users_own_choice_and_other_processes_stay_as_they_are():
    assert share_of_gpus("0,1", {**local_worker(0, 2), "CUDA_VISIBLE_DEVICES": "7"}) == {}
    assert share_of_gpus("0,1", {}) == {}


@pytest.mark.parametrize(
    "base, given, task, expected",
    [
        ({"HIP_VISIBLE_DEVICES": "0,1"}, "0,1", local_worker(1, 2), "1"),
        ({"HIP_VISIBLE_DEVICES": "0,1"}, "", {"CUDA_VISIBLE_DEVICES": "2"}, "2"),
        ({"HIP_VISIBLE_DEVICES": "0,1"}, "", {}, "0,1"),
        ({}, "0,1", local_worker(1, 2), None),
    ],
)
def test_amds_runtime_sees_the_same_share(base, given, task, expected):
    assert with_share(base, given, task).get("HIP_VISIBLE_DEVICES") == expected


@pytest.mark.parametrize(
    "environ, expected",
    [
        ("CUDA_VISIBLE_DEVICES=1,3", "1,3"),
        ("HIP_VISIBLE_DEVICES=2 ROCR_VISIBLE_DEVICES=0,1,4", "2"),
        ("ROCR_VISIBLE_DEVICES=1,4", "0,1"),
        ("ROCR_VISIBLE_DEVICES=", ""),
        ("", ""),
    ],
)
def test_the_gpus_of_a_step_are_those_of_any_maker(environ, expected):
    assert visible_gpus(dict(word.split("=") for word in environ.split())) == expected


# -- under every policy ------------------------------------------------------------------------------------------------

ROLE_SETS = [(), (), (), (WORKER,), (SERVER,), (SCHEDULER,), (SERVER, WORKER), (SCHEDULER, SERVER)]


def hosts(*attributes: dict) -> list[Host]:
    return [Host(f"h{number}", where=f"hosts:{number}", **attribute) for number, attribute in enumerate(attributes, 1)]


def plain(count: int, **attributes) -> list[Host]:
    return hosts(*[attributes] * count)


def names(placed, role: str) -> list[str]:
    return [host.name for each, _, host in placed if each == role]


def split(num_workers: int, num_servers: int, those: list[Host], policy: str) -> tuple[str, str, str]:
    """The host's numbers of scheduler, servers and workers."""
    placed = place(num_workers, num_servers, those, policy)
    return tuple("".join(name[1:] for name in names(placed, role)) for role in (SCHEDULER, SERVER, WORKER))


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
    expected = [those[index % count] for index in range(servers + workers)]
    assert [host for role, _, host in placed if role != SCHEDULER] == expected


def test_the_listing_explains_each_policy():
    found = listing().split("), ")
    assert [each.partition(" (")[0] for each in found] == list(POLICIES)
    assert "pack (each role fills one host before the next" in found
    assert all(len(each.partition(" (")[2].split()) > 4 for each in found), found


HAVE = "the hosts have slots for"
EIGHT = "h1 1, h2 1, h3 1, h4 1, h5 1, h6 1, h7 1, h8 1"
PACK = "--placement pack: the number of workers that fill"
FULL = "--placement pack: the hosts take at most"


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
        ((5, 1, plain(2, gpus=("0", "1")), "pack"), f"-n 5 {FULL} 4 workers: h1 2, h2 2; set slots="),
        ((1, 1, plain(1), "dedicated"), "--placement dedicated: 1 host cannot take 1 server on the last hosts"),
        ((5, 5, plain(5, slots=1), "dedicated"), "--placement dedicated: 5 hosts cannot take 5 servers"),
    ],
)
def test_jobs_that_do_not_fit_are_refused(arguments, message):
    assert refusal(place, *arguments).startswith(message)


DRAWN = {"slots": st.none() | st.integers(1, 5), "roles": st.sampled_from(ROLE_SETS), "cores": st.integers(1, 4)}
DRAWN["gpus"] = st.sampled_from([(), ("0",), ("0", "1", "2")])
HOSTS = st.lists(st.fixed_dictionaries(DRAWN), min_size=1, max_size=6).map(lambda drawn: hosts(*drawn))


@given(st.integers(1, 12), st.integers(0, 12), HOSTS, st.sampled_from(sorted(POLICIES)))
def test_every_process_has_one_place_within_the_limits_of_its_host(num_workers, num_servers, those, policy):
    try:
        placed = place(num_workers, num_servers, those, policy)
    except LaunchError as error:
        assert not surely_fits(num_workers, num_servers, those, policy), error
        assert refusal(place, num_workers, num_servers, those, policy) == str(error)
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
    assert free_slots(Host("a"), 7) == math.inf
    assert free_slots(Host("a", slots=2), 1) == 1
    assert free_slots(Host("a", gpus=("0", "1")), 1) == 1 and free_slots(Host("a", gpus=("0", "1")), 3) == -1
    assert free_slots(Host("a", slots=4, gpus=("0", "1")), 1) == 3, "slots say that devices are shared"
    assert free_slots(Host("a", roles=("server",)), 0) == 0


def test_a_worker_more_gets_the_devices_that_the_fewest_have():
    host = Host("a", gpus=("0", "1", "2", "3"))
    for taken, spare in (("", "0123"), ("01", "23"), ("0 1 3", "2"), ("0123", "01"), ("0 1 2 3 3", "0")):
        shares = [tuple(share) for share in taken.split()]
        assert spare_gpus(host, shares) == tuple(spare)
        assert spare_gpus(Host("a"), shares) == ()
