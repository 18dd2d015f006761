"""The launcher's variables: read once and checked; the key is never printed."""

import pytest

from dmltrain import env
from dmltrain.errors import UserError

WORKER = {
    "DMLC_ROLE": "worker",
    "DMLC_NUM_WORKER": "3",
    "DMLC_NUM_SERVER": "2",
    "DMLC_WORKER_ID": "1",
    "DMLC_PS_ROOT_URI": "10.0.0.1",
    "DMLC_PS_ROOT_PORT": "9000",
    "DMLC_NODE_HOST": "10.0.0.2",
}


def test_without_a_launcher_a_program_trains_in_one_process():
    alone = env.read({})
    assert (alone.role, alone.num_workers, alone.index, alone.launched) == ("worker", 1, 0, False)


def test_a_worker_reads_its_role_rank_and_addresses():
    place = env.read(WORKER)
    assert (place.index, place.num_workers, place.num_servers) == (1, 3, 2)
    assert (place.root_host, place.root_port, place.node_host) == ("10.0.0.1", 9000, "10.0.0.2")


def test_dmlc_task_id_is_sufficient():
    assert env.read({**WORKER, "DMLC_WORKER_ID": "", "DMLC_TASK_ID": "2"}).index == 2


def test_heartbeats_cannot_be_switched_off_and_ps_lites_variables_are_read():
    assert env.read({**WORKER, "PS_HEARTBEAT_TIMEOUT": "0"}).lost_seconds == 8.5
    assert env.read({**WORKER, "PS_HEARTBEAT_TIMEOUT": "20"}).lost_seconds == 20.0


@pytest.mark.parametrize("text, meaning", [("1", True), ("true", True), ("0", False), ("", None)])
def test_the_place_of_the_optimizer_is_optional(text, meaning):
    assert env.read({**WORKER, "MXNET_UPDATE_ON_KVSTORE": text}).update_on_kvstore is meaning


def test_the_probe_can_be_switched_off():
    assert env.read(WORKER).probe and not env.read({**WORKER, "DMLTRAIN_PROBE": "0"}).probe


def test_a_job_is_elastic_if_it_may_lose_workers():
    assert env.read(WORKER).elastic == 0 and env.read({**WORKER, "DMLTRAIN_ELASTIC": "2"}).elastic == 2


def test_workers_that_join_may_have_ranks_beyond_those_of_the_start():
    more = {**WORKER, "DMLTRAIN_ELASTIC": "1", "DMLTRAIN_MAX_WORKERS": "5"}
    assert (env.read(WORKER).ranks, env.read(more).ranks) == (3, 5)
    found = env.read({**more, "DMLTRAIN_JOIN": "1", "DMLC_WORKER_ID": "4"})
    assert (found.index, found.num_workers, found.joins) == (4, 3, True)


def test_a_replacement_joins_an_elastic_job():
    elastic = {**WORKER, "DMLTRAIN_ELASTIC": "1"}
    assert not env.read(elastic).joins and not env.read({**elastic, "DMLTRAIN_JOIN": "0"}).joins
    assert env.read({**elastic, "DMLTRAIN_JOIN": "1"}).joins
    assert env.read({**elastic, "DMLTRAIN_JOIN": "1", "DMLC_ROLE": "server", "DMLC_NUM_SERVER": "1"}).joins
    assert (
        env.read(elastic).restart_servers,
        env.read({**elastic, "DMLTRAIN_RESTART_SERVERS": "2"}).restart_servers,
    ) == (
        0,
        2,
    )


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
        ({"DMLTRAIN_SERVER_SHARES": "best"}, "DMLTRAIN_SERVER_SHARES='best': expected one of equal, links"),
        ({"DMLTRAIN_ELASTIC": "yes"}, "DMLTRAIN_ELASTIC='yes'"),
        ({"DMLTRAIN_ELASTIC": "4"}, "DMLTRAIN_ELASTIC=4: this job has 3 workers, expected 0 to 3"),
        ({"DMLTRAIN_JOIN": "1"}, "DMLTRAIN_JOIN=1: only workers and servers can join, and only elastic jobs"),
        (
            {"DMLTRAIN_JOIN": "1", "DMLTRAIN_ELASTIC": "1", "DMLC_ROLE": "scheduler"},
            "DMLTRAIN_JOIN=1: only workers and",
        ),
        ({"DMLTRAIN_RESTART_SERVERS": "some"}, "DMLTRAIN_RESTART_SERVERS='some': expected an integer of at least 0"),
        ({"DMLTRAIN_MAX_WORKERS": "4"}, "DMLTRAIN_MAX_WORKERS=4: expected 3 or more, the workers at the start, and"),
        ({"DMLTRAIN_MAX_WORKERS": "2", "DMLTRAIN_ELASTIC": "1"}, "DMLTRAIN_MAX_WORKERS=2: expected 3 or more"),
        ({"DMLTRAIN_MAX_WORKERS": "5", "DMLTRAIN_ELASTIC": "1", "DMLC_WORKER_ID": "3"}, "this job has 3 workers"),
        (
            {"DMLTRAIN_MAX_WORKERS": "5", "DMLTRAIN_ELASTIC": "1", "DMLC_WORKER_ID": "5", "DMLTRAIN_JOIN": "1"},
            "DMLC_WORKER_ID=5: this job has 5 workers, expected 0 to 4",
        ),
        ({"DMLTRAIN_HOST_SUM": "on"}, "DMLTRAIN_HOST_SUM='on': expected one of auto, off"),
        ({"DMLTRAIN_LOST": "worker:x"}, "DMLTRAIN_LOST='worker:x': expected processes such as worker:3,server:0"),
        ({"DMLTRAIN_LOST": "scheduler:0"}, "DMLTRAIN_LOST='scheduler:0': expected processes such as"),
    ],
)
def test_invalid_values_are_named(change, message):
    with pytest.raises(UserError) as raised:
        env.read({**WORKER, **change})
    assert message in str(raised.value)


def test_the_lost_processes_have_roles_and_numbers():
    found = env.read({**WORKER, "DMLTRAIN_LOST": "worker:3,server:0"})
    assert found.lost_before == {("worker", 3), ("server", 0)}


def test_the_key_is_read_and_never_shown(tmp_path):
    path = tmp_path / "key"
    path.write_text("a-secret\n")
    place = env.read({**WORKER, "DMLTRAIN_KEY_FILE": str(path)})
    assert place.key == b"a-secret"
    assert "a-secret" not in repr(place) + str(place)
