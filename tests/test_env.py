"""The launcher's variables: read once and checked; the key is never printed."""

import pytest

from dmltrain.base import env
from dmltrain.base.errors import UserError

WORKER = {
    "DMLC_ROLE": "worker",
    "DMLC_NUM_WORKER": "3",
    "DMLC_NUM_SERVER": "2",
    "DMLC_WORKER_ID": "1",
    "DMLC_PS_ROOT_URI": "10.0.0.1",
    "DMLC_PS_ROOT_PORT": "9000",
    "DMLC_NODE_HOST": "10.0.0.2",
}


ELASTIC = {"DMLTRAIN_ELASTIC": "1"}
MORE = {**ELASTIC, "DMLTRAIN_MAX_WORKERS": "5"}  # than there are at the start


def test_without_a_launcher_a_program_trains_in_one_process():
    alone = env.read({})
    assert (alone.role, alone.num_workers, alone.index, alone.launched) == ("worker", 1, 0, False)
    assert not env.Environment().joins


@pytest.mark.parametrize(
    ("rank", "size", "found"),
    [("", "", (0, 1)), ("2", "3", (2, 3)), ("x", "3", "RANK='x'"), ("0", "0", "WORLD_SIZE='0'"), ("3", "3", "0 to 2")],
)
def test_the_place_that_torchrun_says(rank, size, found):
    if isinstance(found, tuple):
        assert env.torch_place({"RANK": rank, "WORLD_SIZE": size}) == found
    else:
        with pytest.raises(UserError, match=found):
            env.torch_place({"RANK": rank, "WORLD_SIZE": size})


def test_groups_of_torch_distributed_limit_waits_unless_the_variable_is_set():
    set_ = {"DMLTRAIN_WAIT_TIMEOUT": "30"}
    waits = [env.of_collectives(env.read(each), each).wait_seconds for each in (WORKER, {**WORKER, **set_})]
    assert waits == [env.UNLIMITED, 30.0]


@pytest.mark.parametrize(
    "change, found",
    [
        ({}, {"index": 1, "num_workers": 3, "num_servers": 2, "ranks": 3, "elastic": 0, "restart_servers": 0}),
        ({}, {"root_host": "10.0.0.1", "root_port": 9000, "node_host": "10.0.0.2"}),
        ({"DMLC_WORKER_ID": "", "DMLC_TASK_ID": "2"}, {"index": 2}),
        ({"PS_HEARTBEAT_TIMEOUT": "0"}, {"lost_seconds": 8.5}),  # heartbeats cannot be switched off
        ({"PS_HEARTBEAT_TIMEOUT": "20"}, {"lost_seconds": 20.0}),
        ({"MXNET_UPDATE_ON_KVSTORE": "1"}, {"update_on_kvstore": True}),
        ({"MXNET_UPDATE_ON_KVSTORE": "true"}, {"update_on_kvstore": True}),
        ({"MXNET_UPDATE_ON_KVSTORE": "0"}, {"update_on_kvstore": False}),
        ({"MXNET_UPDATE_ON_KVSTORE": ""}, {"update_on_kvstore": None}),
        ({}, {"probe": True}),
        ({"DMLTRAIN_PROBE": "0"}, {"probe": False}),
        ({"DMLTRAIN_INCARNATION": "1"}, {"incarnation": 1}),
        ({"DMLTRAIN_ELASTIC": "2"}, {"elastic": 2, "joins": False}),
        ({**ELASTIC, "DMLTRAIN_JOIN": "0"}, {"joins": False}),
        ({**ELASTIC, "DMLTRAIN_JOIN": "1"}, {"joins": True}),
        ({**ELASTIC, "DMLTRAIN_JOIN": "1", "DMLC_ROLE": "server", "DMLC_NUM_SERVER": "1"}, {"joins": True}),
        ({**ELASTIC, "DMLTRAIN_RESTART_SERVERS": "2"}, {"restart_servers": 2}),
        (MORE, {"ranks": 5}),
        ({**MORE, "DMLTRAIN_JOIN": "1", "DMLC_WORKER_ID": "4"}, {"index": 4, "num_workers": 3, "joins": True}),
        ({"DMLTRAIN_LOST": "worker:3,server:0"}, {"lost_before": {("worker", 3), ("server", 0)}}),
    ],
)
def test_what_a_process_of_a_job_reads(change, found):
    place = env.read({**WORKER, **change})
    assert {name: getattr(place, name) for name in found} == found


@pytest.mark.parametrize(
    "change, message",
    [
        ({"DMLC_ROLE": "king"}, "DMLC_ROLE='king': expected one of scheduler, server, worker"),
        ({"DMLC_NUM_WORKER": ""}, "DMLC_NUM_WORKER=''"),
        ({"DMLC_NUM_WORKER": "0"}, "an integer of at least 1"),
        ({"DMLC_WORKER_ID": "3"}, "this job has 3 workers, expected 0 to 2"),
        ({"DMLC_PS_ROOT_PORT": "many"}, "DMLC_PS_ROOT_PORT='many'"),
        ({"DMLTRAIN_KEY_FILE": "/does/not/exist"}, "DMLTRAIN_KEY_FILE=/does/not/exist: No such file"),
        ({"DMLTRAIN_WAIT_TIMEOUT": "soon"}, "DMLTRAIN_WAIT_TIMEOUT='soon': expected a positive number of seconds"),
        ({"DMLTRAIN_WAIT_TIMEOUT": "nan"}, "expected a positive number of seconds"),
        ({"DMLTRAIN_HEARTBEAT_TIMEOUT": "2"}, "too short for an interval of 1 s"),
        ({"DMLTRAIN_KEY_FILE": "/dev/null"}, "/dev/null is empty"),
        ({"DMLTRAIN_LISTEN_FD": "x"}, "DMLTRAIN_LISTEN_FD='x'"),
        ({"DMLTRAIN_AGENT_FD": "-1"}, "DMLTRAIN_AGENT_FD='-1'"),
        ({"DMLTRAIN_SERVER_SHARES": "best"}, "DMLTRAIN_SERVER_SHARES='best': expected one of equal, links"),
        ({"DMLTRAIN_ELASTIC": "yes"}, "DMLTRAIN_ELASTIC='yes'"),
        ({"DMLTRAIN_ELASTIC": "4"}, "DMLTRAIN_ELASTIC=4: this job has 3 workers, expected 0 to 3"),
        ({"DMLTRAIN_JOIN": "1"}, "DMLTRAIN_JOIN=1: only workers and servers can join, and only elastic jobs"),
        ({**ELASTIC, "DMLTRAIN_JOIN": "1", "DMLC_ROLE": "scheduler"}, "DMLTRAIN_JOIN=1: only workers and"),
        ({"DMLTRAIN_RESTART_SERVERS": "some"}, "DMLTRAIN_RESTART_SERVERS='some': expected an integer of at least 0"),
        ({"DMLTRAIN_MAX_WORKERS": "4"}, "DMLTRAIN_MAX_WORKERS=4: expected 3 or more, the workers at the start, and"),
        ({"DMLTRAIN_MAX_WORKERS": "2", "DMLTRAIN_ELASTIC": "1"}, "DMLTRAIN_MAX_WORKERS=2: expected 3 or more"),
        ({**MORE, "DMLC_WORKER_ID": "3"}, "this job has 3 workers"),
        ({**MORE, "DMLC_WORKER_ID": "5", "DMLTRAIN_JOIN": "1"}, "this job has 5 workers, expected 0 to 4"),
        ({"DMLTRAIN_HOST_SUM": "on"}, "DMLTRAIN_HOST_SUM='on': expected one of auto, off"),
        ({"DMLTRAIN_LOST": "worker:x"}, "DMLTRAIN_LOST='worker:x': expected processes such as worker:3,server:0"),
        ({"DMLTRAIN_LOST": "scheduler:0"}, "DMLTRAIN_LOST='scheduler:0': expected processes such as"),
    ],
)
def test_invalid_values_are_named(change, message):
    with pytest.raises(UserError) as raised:
        env.read({**WORKER, **change})
    assert message in str(raised.value)


def test_the_key_is_read_and_never_shown(tmp_path):
    path = tmp_path / "key"
    path.write_text("a-secret\n")
    place = env.read({**WORKER, "DMLTRAIN_KEY_FILE": str(path)})
    assert place.key == b"a-secret"
    assert "a-secret" not in repr(place) + str(place)
