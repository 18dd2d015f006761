"""What an agent does before processes start: it inspects its host, and reaches and measures the others."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.agent.outcome import UNAUTHENTICATED
from launch.agent.process import living
from tests.launch.conftest import DEADLINE, wait_for
from tests.launch.test_agent import Conversation
from tests.scripts import shell_script


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Conversation]:
    (tmp_path / "other").mkdir()
    made = Conversation(tmp_path / "other")
    yield made
    made.stop()
    made.channel.close()


def bound(talk: Conversation, address: str = "127.0.0.1", **wanted: object) -> dict[str, int]:
    talk.send(do="bind", address=address, **wanted)
    return talk.until("bound")["ports"]


def is_open(port: int) -> bool:
    with socket.socket() as caller:
        return caller.connect_ex(("127.0.0.1", port)) == 0


def test_a_host_is_inspected_as_often_as_it_is_asked(talk):
    for workdir, path in (("~", os.path.expanduser("~")), ("/tmp", "/tmp")):
        talk.send(do="probe", request={"workdir": workdir, "argv": ["sh"], "needs": ["json", "nonesuch"]})
        facts = talk.until("probed")["facts"]
        assert facts["workdir"]["path"] == path and facts["program"]["executable"]
        assert facts["inspection"]["missing"] == ["nonesuch"]
        assert talk.answer() == [], "one answer each"
    for request in ({"argv": ["sh"]}, {"argv": ["sh"], "workdir": None}):
        talk.send(do="probe", request=request)
        assert talk.until("probed")["facts"]["workdir"] is None


def test_the_end_of_the_job_ends_its_inspection(tmp_path):
    talk = Conversation(tmp_path)
    hung = shell_script(tmp_path / "python", f"echo $$ > {tmp_path}/pid\nexec sleep 300")
    talk.send(do="probe", request={"argv": ["sh"], "python": str(hung)})
    pid = int(wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip(), "its pid"))
    assert talk.stop()["left"] == []
    wait_for(lambda: pid not in living(), "the end of the interpreter")


def test_ports_are_reserved_or_listened_on_as_requested(tmp_path):
    talk = Conversation(tmp_path)
    assert bound(talk, scheduler=None, master=None) == {}
    ports = bound(talk, scheduler=0, master=0, reach=True, throughput=True)
    assert all(ports.values())
    opened = {name: is_open(port) for name, port in ports.items()}
    assert opened == {"scheduler": False, "master": False, "reach": True, "throughput": True}
    talk.send(do="start", unset=[], tasks=[])
    assert talk.answer() == []
    assert not is_open(ports["reach"]) and not is_open(ports["throughput"]), "the job begins"
    for name in ("scheduler", "master"):
        with pytest.raises(OSError, match="in use"), socket.socket() as taker:
            taker.bind(("127.0.0.1", ports[name]))
    assert talk.stop()["left"] == []
    for name in ("scheduler", "master"):
        with socket.socket() as taker:
            taker.bind(("127.0.0.1", ports[name]))
    assert talk.channel.close() == "exited with 0"


@pytest.mark.parametrize("purpose", ["reach", "throughput"])
def test_an_address_of_another_machine_is_refused(talk, purpose):
    talk.send(do="bind", address="192.0.2.77", **{purpose: True})
    refused = talk.until("refused")
    assert refused["code"] == 2
    assert refused["message"].startswith("192.0.2.77 on here") and "Cannot assign requested" in refused["message"]


def test_two_hosts_reach_each_other_once_and_measure_again_and_again_but_not_before_they_are_prepared(talk, other):
    talk.send(do="reach", peers=[["here", "127.0.0.1", 1]])
    talk.send(do="measure", peer=["here", "127.0.0.1", 1])
    assert talk.answer() == []
    here, there = (bound(each, reach=True, throughput=True) for each in (talk, other))
    for each, ports in ((talk, there), (other, here)):
        each.send(do="reach", peers=[[name, "127.0.0.1", ports["reach"]] for name in ("here", "elsewhere")])
        peers = each.until("reached")["peers"]
        assert set(peers) == {"here", "elsewhere"} and 0 < peers["here"]["ms"] < 1000 * DEADLINE
        assert peers["elsewhere"] == {"error": UNAUTHENTICATED}, "that is another host"
    for _ in range(2):
        talk.send(do="measure", peer=["here", "127.0.0.1", there["throughput"]])
        found = talk.until("measured")
        assert found["peer"] == "here" and min(found["out"], found["back"]) > 1e6
    assert talk.answer() == other.answer() == []
