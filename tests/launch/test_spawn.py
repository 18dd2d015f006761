"""What an agent does before processes start, what they start with, and why one cannot: over the channel of agents."""

import errno
import os
import resource
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dmltrain_launch.agent import Refusal
from dmltrain_launch.agent.network.outcome import UNAUTHENTICATED
from dmltrain_launch.agent.ports import HeldPorts
from dmltrain_launch.agent.process import living, process
from dmltrain_launch.agent.run_folder import RunFolder
from dmltrain_launch.agent.spawn import environment_here, reached_at, spawn_refusal
from tests.launch.conftest import DEADLINE, wait_for
from tests.launch.test_agent import Conversation
from tests.scripts import shell_script

ROOT = Path(__file__).parents[2]


def task(folder: Path | str, *argv: str, number: int = 0, **more: object) -> dict:
    return {"task": number, "argv": argv, "environment": {}, "workdir": str(folder), **more}


def refusal(talk: Conversation, *argv: str, **more: object) -> tuple[int, str]:
    """Why the agent does not start this task."""
    talk.send(do="start", unset=[], tasks=[task(talk.folder, *argv, **more)])
    refused = talk.until("refused")
    return refused["code"], refused["message"]


def test_a_process_has_its_environment_and_folder_and_nothing_on_its_standard_input(talk):
    said = 'echo "$ADDED|$HOME|$DMLC_ROLE|$PWD"; readlink /proc/self/fd/0; cat "$DMLTRAIN_KEY_FILE"; exit 4'
    environment = {"ADDED": "a b", "DMLTRAIN_JOB": talk.mark}
    rows = [task(talk.folder, "sh", "-c", said, number=5, environment=environment)]
    talk.send(do="start", unset=["HOME", "DMLC_ROLE"], tasks=rows)
    assert talk.until("started")["task"] == 5
    assert talk.until("exited") == {"event": "exited", "task": 5, "code": 4}
    assert talk.printed[5].decode() == f"a b|||{talk.folder}\n/dev/null\n00"
    talk.send(do="start", unset=[], tasks=[task("~", "pwd", number=6)])
    talk.until("exited")
    assert talk.printed[6].decode().strip() == os.path.realpath(os.path.expanduser("~"))


def test_a_process_leads_a_session_and_has_the_limit_on_memory_that_was_asked_for(talk):
    rows = [task("/", "sleep", "300", number=number, memory=memory) for number, memory in enumerate((0, 300))]
    talk.send(do="start", unset=[], tasks=rows)
    free, limited = (talk.until("started")["pid"] for _ in rows)
    assert os.getsid(free) == free and os.getsid(limited) == limited
    assert resource.prlimit(limited, resource.RLIMIT_DATA) == (300 << 20, 300 << 20)
    assert resource.prlimit(free, resource.RLIMIT_DATA) == resource.prlimit(0, resource.RLIMIT_DATA)


def test_the_programs_of_a_virtual_environment_come_first(tmp_path, monkeypatch):
    (tmp_path / "venv/bin").mkdir(parents=True)
    bin = f"{tmp_path}/venv/bin"
    monkeypatch.setattr(sys, "executable", f"{bin}/python")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setenv("KEPT", "1")
    monkeypatch.setenv("TAKEN", "1")
    assert environment_here(["TAKEN"])["PATH"] == "/usr/bin:/bin", "it is a plain folder yet"
    (tmp_path / "venv/pyvenv.cfg").touch()
    found = environment_here(["TAKEN"])
    assert (found["PATH"], found["KEPT"], "TAKEN" in found) == (f"{bin}:/usr/bin:/bin", "1", False)
    monkeypatch.setenv("PATH", f"/bin:{bin}")
    assert environment_here([])["PATH"] == f"/bin:{bin}", "it is there already"
    monkeypatch.delenv("PATH")
    assert environment_here([])["PATH"] == f"{bin}:{os.defpath}"


@pytest.mark.parametrize(
    ("said", "address"), [("10.1.0.9 51000 10.0.0.4 22", "10.0.0.4"), ("", ""), ("10.1.0.9 51000 10.0.0.4", "")]
)
def test_the_address_that_ssh_reached_comes_from_sshd(monkeypatch, said, address):
    monkeypatch.setenv("SSH_CONNECTION", said)
    assert reached_at() == address
    monkeypatch.delenv("SSH_CONNECTION")
    assert reached_at() == ""


CANNOT_START = {
    "no-such-program": (127, "program no-such-program not found in PATH on here (working directory {folder})"),
    "./gone": (127, "program ./gone not found on here (working directory {folder})"),
    "python9": (127, "program python9 not found in PATH on here (working directory {folder}); a bare script.py is"),
    "./folder": (126, "./folder is a folder on here, not a program"),
    "./plain": (126, "program ./plain is not executable on here: chmod +x ./plain"),
    "./lost": (127, "the interpreter in the first line (#!) of ./lost was not found on here"),
    "./bare": (126, "program ./bare cannot be run on here: Exec format error; does its first line lack #!"),
    "a\0b": (126, "program a\0b cannot be run on here: embedded null byte"),
}


def test_programs_scripts_and_folders_that_are_not_there_or_cannot_be_started(talk):
    (talk.folder / "folder").mkdir()
    (talk.folder / "plain").write_text("#!/bin/sh\n")
    shell_script(talk.folder / "lost", "").write_text("#!/no/such/interpreter\n")
    shell_script(talk.folder / "bare", "").write_text("echo x\n")
    for program, (code, message) in CANNOT_START.items():
        found, said = refusal(talk, program)
        assert found == code and said.startswith(message.format(folder=talk.folder))
    for script in ("train.py", "folder"):  # a folder is no script
        gone = (127, f"script {script} not found on here (working directory {talk.folder})")
        assert refusal(talk, "python3", script, script=script) == gone
    gone = (127, "the working directory /no/such does not exist on here")
    assert refusal(talk, "true", workdir="/no/such") == gone


def test_permission_errors_of_folder_and_program_are_distinguished():
    closed = PermissionError(errno.EACCES, "Permission denied", "/closed")
    entered = spawn_refusal(closed, ["true"], "/closed", "here")
    assert str(entered).startswith("the working directory /closed on here cannot be entered") and entered.code == 126
    assert str(spawn_refusal(closed, ["/closed"], "/", "here")).startswith("program /closed is not executable on here")


def test_a_refused_process_closes_its_listening_socket(talk):
    talk.send(do="bind", address="127.0.0.1", scheduler=0)
    port = talk.until("bound")["ports"]["scheduler"]
    assert refusal(talk, "no-such-program", listens=True)[0] == 127
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_key_and_certificate_are_in_private_files_until_the_job_ends(tmp_path, monkeypatch):
    talk = Conversation(tmp_path)
    (folder,) = Path(tempfile.gettempdir()).glob(f"dmltrain-{talk.mark}.*")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert (folder / "key").read_text() == "00"
    talk.stop()
    assert not folder.exists()
    (tmp_path / "own").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "own"))
    made = RunFolder("job")
    made.create("secret", "PEM")
    files = [Path(each) for each in (made.key_file, made.certificate_file)]
    assert [file.read_text() for file in files] == ["secret", "PEM"]
    assert [stat.S_IMODE(file.stat().st_mode) for file in files] == [0o600] * 2
    made.remove()
    assert not list((tmp_path / "own").iterdir())


def test_the_folder_of_a_killed_agent_goes_with_that_of_its_successor(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    first, second, other = RunFolder("job-1"), RunFolder("job-1"), RunFolder("job-11")
    for each in (first, second, other):
        each.create("secret", "")
    second.remove()
    (left,) = tmp_path.iterdir()
    assert str(left / "key") == other.key_file
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(Refusal, match="private folder in TMPDIR or /tmp: No such file") as said:
        RunFolder("job").create("secret", "")
    assert said.value.code == 125


def test_only_this_users_folders_are_removed_and_a_very_deep_one_ends_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made = RunFolder("job")
    made.create("secret", "")
    (tmp_path / "dmltrain-job.file").touch()
    (tmp_path / "dmltrain-job.link").symlink_to(tmp_path)
    deep = tmp_path / "dmltrain-job.deep"
    deep.mkdir()
    here = os.open(deep, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    foreign = tmp_path / "dmltrain-job.foreign"
    foreign.mkdir()
    if not os.geteuid():
        os.chown(foreign, 2002, 2002)
    there = f"import tempfile; tempfile.tempdir = {str(tmp_path)!r}"
    remove = "from dmltrain_launch.agent.run_folder import RunFolder; RunFolder('job').remove()"
    subprocess.run([sys.executable, "-c", f"{there}; {remove}"], cwd=ROOT, check=True)
    left = {path.name for path in tmp_path.iterdir()} - {deep.name}
    assert left == {"dmltrain-job.file", "dmltrain-job.link", *([foreign.name] if not os.geteuid() else [])}
    subprocess.run(["rm", "-rf", deep], check=True)


def test_a_port_is_held_for_one_purpose_until_it_is_taken():
    held = HeldPorts()
    held.bind("scheduler", "127.0.0.1", 0, "here")
    six, family = ("::1", socket.AF_INET6) if socket.has_dualstack_ipv6() else ("127.0.0.1", socket.AF_INET)
    held.bind("master", six, 0, "here")
    numbers = held.numbers
    assert set(numbers) == {"scheduler", "master"} and all(numbers.values())
    with pytest.raises(OSError, match="in use"), socket.socket() as other:
        other.bind(("127.0.0.1", numbers["scheduler"]))
    taken = held.take("scheduler")
    assert taken.getsockname() == ("127.0.0.1", numbers["scheduler"])
    assert held.take("scheduler") is None and set(held.numbers) == {"master"}
    taken.close()
    held.close()
    with socket.socket(family) as other:
        other.bind((six, numbers["master"]))


def test_a_port_in_use(talk):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        talk.send(do="bind", address="127.0.0.1", scheduler=port)
        refused = talk.until("refused")
    assert refused["message"].startswith(f"port {port} of 127.0.0.1 on here is not available: Address already in use")
    assert refused["code"] == 2 and "--port" in refused["message"]
    talk.send(do="bind", address="192.0.2.9", scheduler=0)
    assert talk.until("refused")["message"].startswith("a port of 192.0.2.9 on here is not available: ")


def test_the_agent_reports_its_identity(talk):
    ready = talk.ready
    assert process(ready["pid"]).parent == os.getpid()
    assert ready["python"] == sys.executable
    assert ready["cores"] == len(os.sched_getaffinity(0)) or ready["machine"]["limits"]


# -- the agent inspects its host, and reaches and measures the others --------------------------------------------------


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
