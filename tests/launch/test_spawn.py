"""What a process of a job starts with, and why one cannot start: over the agent's channel."""

import errno
import os
import resource
import socket
import stat
import sys
import tempfile
from pathlib import Path

import pytest

from launch.agent import Refusal
from launch.agent.process import process
from launch.agent.spawn import HeldPorts, RunFolder, environment_here, reached_at, spawn_refusal
from tests.launch.test_agent import Conversation
from tests.scripts import shell_script


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
    assert [each.read_text() for each in files] == ["secret", "PEM"]
    assert [stat.S_IMODE(each.stat().st_mode) for each in files] == [0o600] * 2
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
