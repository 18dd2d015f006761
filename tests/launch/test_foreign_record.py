"""What a job.json of another user, an altered one and one of an earlier process can do: nothing.

Attacks are records that processes of another user write, and commands of this user that are told to read them. The
records would run a program of the other user: as the Python of a host, as mpirun, or as a ProxyCommand of SSH.
"""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dmltrain_launch import LaunchError
from dmltrain_launch.agent.process import boot_id, process
from dmltrain_launch.cli import job, launch
from dmltrain_launch.clusters import AllOptions
from dmltrain_launch.commands import jobs, processes, show, visit
from dmltrain_launch.commands.recorded import Launcher
from dmltrain_launch.job.host import Host
from dmltrain_launch.job.job import Job
from dmltrain_launch.run import record
from dmltrain_launch.run.supervise import Supervisor
from dmltrain_launch.run.supervisor.limit import Limits
from dmltrain_launch.terminal.log_folder import LogFolder
from dmltrain_launch.terminal.record import MOST_BYTES
from tests.launch.conftest import run, wait_for
from tests.launch.refusal import refusal
from tests.other_user import OTHER_USER, USER, shell, sticky_folder
from tests.traced import traced

LAUNCHED_FROM = {"host": "login", "pid": 4056, "start": 123456, "boot_id": "7b0e"}
SSH = {"ssh": "system", "ssh_port": 2222, "identity": "/home/anna/.ssh/key"}
MPI = {"mpirun": "/opt/mpi/bin/mpirun", "mpirun_args": ["--quiet"]}
WHERE = {"name": "h1", "address": "10.0.0.2", "interface": "eth1"}
LOGIN = {"hostname": "h1.example.org", "user": "anna", "port": 22, "python": "/usr/bin/python3"}
WORKER = {"role": "worker", "rank": 0, "host": "h1", "pid": 4091}
ENDED = {"exit_code": 0, "signal": "9", "ended_by_launcher": True, "lost_after": 12.5}
RECORD: dict[str, Any] = {
    "format": 1,
    "job": "fit",
    "mark": "fit-0123456789abcdef",
    "command": ["train.py", "--lr"],
    "workdir": "/home/anna/project",
    "launcher": "ssh",
    "launched_from": LAUNCHED_FROM,
    "reached_by": {**SSH, **MPI, "host_ip": "10.0.0.1"},
    "num_workers": 1,
    "num_servers": 1,
    "versions": {"dmltrain": "0.5.0", "python": "3.11.7", "system": "Linux"},
    "hosts": [{**WHERE, **LOGIN}],
    "started": "2027-01-15T08:00:00+0000",
    "ended": "2027-01-15T08:00:01+0000",
    "seconds": 0.353,
    "exit_code": 0,
    "cause": "worker 0 was killed",
    "cause_log": "worker-0.log",
    "processes": [{**WORKER, **ENDED}],
    "restarts": [{"exit_code": 9, "cause": "killed", "ended": "2027-01-15T08:00:01+0000", "logs": "logs/fit"}],
}
SHOWN = (  # by `job ls`, `job logs` or nothing: they may hold any text
    *("command", "workdir", "num_workers", "num_servers", "versions", "started", "ended", "seconds", "exit_code"),
    *("cause", "cause_log", "processes", "restarts"),
)
Path_ = tuple[Any, ...]


def nodes(found: Any, path: Path_ = ()) -> Iterator[Path_]:
    """The paths of all values but the whole."""
    for key, value in found.items() if isinstance(found, dict) else enumerate(found):
        yield (*path, key)
        if isinstance(value, (dict, list)):
            yield from nodes(value, (*path, key))


def is_leaf(path: Path_) -> bool:
    """Whether the value there is neither an object nor a list."""
    return not any(other[:-1] == path for other in nodes(RECORD))


def named(path: Path_) -> str:
    return ".".join(map(str, path))


def at(path: Path_, value: Any) -> dict[str, Any]:
    """The record with another value at the path."""
    made = json.loads(json.dumps(RECORD))
    inner = made
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "fit"
    made.mkdir()
    write(made, RECORD)
    return made


def write(folder: Path, record: Any) -> Path:
    path = folder / "job.json"
    path.write_text(json.dumps(record))
    path.chmod(0o644)
    return path


def read(folder: Path, **given: Any) -> Any:
    return visit.read(folder, AllOptions(**given))


def listed(folder: Path) -> list[str]:
    """What `job ls` prints for it, and `job ps` of lost workers; `job logs` can read it as well."""
    found = jobs.find_jobs(folder.parent)
    if found[0].state != jobs.UNREADABLE:
        assert all(source.role and source.which >= 0 for source in show.Record(folder).sources)
    return [*jobs.table(found, 0.0), *processes.lost(found[0].record)]


# -- another user's record ---------------------------------------------------------------------------------------------


def attack(launcher: str, **fields: str) -> str:
    """A shell script that makes a job in a folder $1/job, whose record runs $1/evil, which leaves $1/proof."""
    record = {
        **at(("launcher",), launcher),
        "launched_from": {"host": platform.node(), "pid": 1},
        "hosts": [{"name": "localhost", "address": "127.0.0.1", **fields}],
        "reached_by": {"mpirun": "@/evil", "ssh": "paramiko"},
        "ended": None,
    }
    text = json.dumps(record)
    return f"""umask 022; mkdir $1 $1/job
        printf '#!/bin/sh\\ntouch %s/proof\\n' $1 > $1/evil; chmod 755 $1/evil; chmod 777 $1
        cat <<'END' | sed "s:@:$1:g" > $1/job/job.json
{text}
END"""


ATTACKS = {
    "python": attack("local", python="@/evil"),
    "mpirun": attack("mpi"),
    "ProxyCommand": attack("ssh", user="x\nProxyCommand @/evil"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_a_record_of_another_user_runs_nothing(tmp_path, name):
    """If only the owner were checked: what the record says is refused, or is what its owner may say."""
    with sticky_folder() as shared:
        shell(OTHER_USER, ATTACKS[name], shared / "theirs")
        for program, words in ((job, ["ps"]), (job, ["kill"]), (launch, ["--ps"]), (launch, ["--kill"])):
            said = refusal(program, [*words, str(shared / "theirs/job")])
            assert f"{shared}/theirs/job" in said and "\n" not in said and "run this command as" in said
            assert f"belongs to user {OTHER_USER}, not to root: " in said
        assert not (shared / "theirs/proof").exists()
        content = json.loads((shared / "theirs/job/job.json").read_text())
    (tmp_path / "mine").mkdir()
    write(tmp_path / "mine", content)
    if name == "ProxyCommand":
        assert "hosts[0].user is 'x\\nProxyCommand " in refusal(read, tmp_path / "mine")
    else:
        found = read(tmp_path / "mine")
        assert "evil" in (found.hosts[0].python if name == "python" else found.options.mpirun)


def test_another_users_logs_and_jobs_can_be_shown(tmp_path):
    with sticky_folder() as shared:
        shell(OTHER_USER, ATTACKS["python"] + "\necho hello > $1/job/worker-0.log", shared / "theirs")
        reader, writer = os.pipe()
        assert show.show(str(shared / "theirs/job"), "", False, writer) == ""
        os.close(writer)
        assert os.read(reader, 100) == b"[worker-0] hello\n"
        os.close(reader)
        assert jobs.find_jobs(shared / "theirs")[0].record["job"] == "fit"


def test_a_record_or_a_folder_of_another_user_is_refused_wherever_it_is_moved_to(folder):
    """The owner of a folder can exchange a record there for that of another job."""
    with sticky_folder() as shared:
        shell(OTHER_USER, ATTACKS["python"], shared / "theirs")
        shell(OTHER_USER, "mkdir -m 777 $1", shared / "open")
        os.rename(folder / "job.json", shared / "open/job.json")
        assert f"{shared}/open belongs to user {OTHER_USER}, not to " in refusal(read, shared / "open")
        os.rename(shared / "theirs/job/job.json", folder / "job.json")
    assert f"{folder}/job.json belongs to user {OTHER_USER}, not to " in refusal(read, folder)


@pytest.mark.parametrize(
    "name, mode, allowed",
    [
        *(("job.json", 0o600, True), ("job.json", 0o644, True), ("job.json", 0o664, False), ("job.json", 0o646, False)),
        *(("", 0o755, True), ("", 0o775, True), ("", 0o1777, True), ("", 0o777, False)),
    ],
)
def test_a_record_that_others_can_write_or_exchange_is_refused(folder, name, mode, allowed):
    path = folder / name
    path.chmod(mode)
    if os.geteuid() == 0 and name:
        os.chown(path, -1, OTHER_USER)
    if allowed:
        read(folder)
    else:
        message = refusal(read, folder)
        assert f"other users can write to {path} (mode {mode:04o})" in message
        assert message.endswith(f"chmod go-w {path}")


def test_the_launcher_writes_a_record_that_others_cannot_write(tmp_path):
    before = os.umask(0)
    try:
        LogFolder(tmp_path).write_record(RECORD)
    finally:
        os.umask(before)
    assert (tmp_path / "job.json").stat().st_mode & 0o777 == 0o644


# -- what is no record -------------------------------------------------------------------------------------------------


def link(path: Path) -> None:
    path.rename(path.parent / "other")
    path.symlink_to("other")


def huge(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(MOST_BYTES + 1)


def deep(path: Path) -> None:
    path.write_text("[" * 200000)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


NO_RECORDS = {
    link: "Too many levels of symbolic links",
    huge: "it is larger than 16 MiB",
    deep: "nested too deeply",
    pipe: "it is not a regular file",
}


@pytest.mark.parametrize("make", NO_RECORDS, ids=lambda make: make.__name__)
def test_what_is_no_record_is_refused_at_once(folder, make):
    make(folder / "job.json")
    message = refusal(read, folder)
    assert message.startswith(f"cannot read {folder}/job.json: ") and NO_RECORDS[make] in message
    if make is not link:
        assert [row.state for row in jobs.find_jobs(folder.parent)] == [jobs.UNREADABLE]
    (folder / "job.json").unlink()
    assert refusal(read, folder).startswith(f"{folder}/job.json is missing")


# -- every field -------------------------------------------------------------------------------------------------------


def test_a_complete_record_is_read(folder):
    found = read(folder)
    assert (found.job, found.mark, found.ended, found.cluster) == ("fit", "fit-0123456789abcdef", True, "ssh")
    assert found.launcher == Launcher("login", 4056, 123456, "7b0e")
    (host,) = found.hosts
    assert {name: getattr(host, name) for name in RECORD["hosts"][0]} == RECORD["hosts"][0]
    used = replace(AllOptions(), **RECORD["reached_by"] | {"mpirun_args": ("--quiet",)})
    assert found.options == used


def test_fields_that_may_be_missing(folder):
    less = {"hosts": [{"name": "h1"}], "launched_from": {"host": "login"}, "reached_by": {}, "job": "a\xa0b"}
    write(folder, {name: value for name, value in {**RECORD, **less}.items() if name != "ended"})
    found = read(folder)
    assert found.hosts == (Host("h1", where=f"{folder}/job.json: hosts[0]"),)
    assert (found.launcher, found.options, found.ended) == (Launcher("login"), AllOptions(), False)
    assert found.job == "a\xa0b", "this space is no control character"


CONTROLS = ("a\nProxyCommand touch /tmp/x", "a\x1b[2J", "a\x9b2J", "a\x7f", "a\ud800")  # the last one is not UTF-8


@pytest.mark.parametrize("path", list(nodes(RECORD)), ids=named)
def test_wrong_values_and_control_characters_in_each_field_are_read_or_refused(folder, path):
    """Never a traceback; and what decides who is reached is never anything else than the table allows."""
    whole = read(folder)
    for value in WRONG:
        write(folder, at(path, value))
        try:
            found = read(folder)
        except LaunchError as error:
            assert str(error).startswith(str(folder)) and str(error).isprintable()
        else:
            assert path[0] not in SHOWN or replace(found, ended=True) == whole
        assert all(line.isprintable() for line in listed(folder)), "one line a job"
    for text in CONTROLS if is_leaf(path) else ():
        write(folder, at(path, text))
        if path[0] in SHOWN:
            assert read(folder) == whole
        else:
            message = refusal(read, folder)
            name = path[-2] if path[-1] == 0 else path[-1]
            assert name in message and message.isprintable()
        assert all(line.isprintable() for line in listed(folder)), "one line a job"


WRONG = (None, True, -1, 10**30, 1.5, float("nan"), 1e300, "", "x y", "-o", "a;b", [], [[]], [None], {}, {"a": {}})


@pytest.mark.parametrize(
    "path, value, expected",
    [
        ("mark", "a;b", "expected the mark of a job"),
        ("launcher", "mesos", "unknown launcher 'mesos': expected local "),
        ("launcher", [], "launcher is [], expected a text"),
        ("hosts", [], "no hosts; expected"),
        ("hosts", RECORD["hosts"] * 2, "h1 is already given"),
        ("hosts.0", "h1", "hosts[0] is 'h1', expected an object"),
        ("hosts.0.name", "-oProxyCommand=x", "is not a host name"),
        ("hosts.0.user", "-oProxyCommand=x", "user=-oProxyCommand=x: expected the name of a user"),
        ("hosts.0.user", "a;touch x", "expected the name of a user"),
        ("hosts.0.python", "bin/python", "expected a command such as python3.11"),
        ("hosts.0.hostname", "$(touch x)", "is not a host name"),
        ("hosts.0.port", 65536, "hosts[0].port is 65536, expected a whole number from 0 to 65535"),
        ("hosts.0.port", True, "hosts[0].port is True, expected a whole number"),
        (
            "hosts.0.environment",
            [["LD_PRELOAD", "/tmp/x"]],
            "hosts[0] has the unknown field 'environment', expected name, address",
        ),
        ("reached_by.mpirun", "./mpirun", "a path that starts with /"),
        ("reached_by.identity", "key", "reached_by.identity is 'key', expected a path that starts with /"),
        ("reached_by.ssh", "evil", "reached_by: ssh evil: expected one of paramiko, system"),
        ("reached_by.host_ip", "host", "host_ip is host: expected an IP address"),
        ("reached_by.log_file", "/etc/x", "reached_by has the unknown field 'log_file', expected ssh, ssh_port"),
        ("reached_by.mpirun_args", "--x", "reached_by.mpirun_args is '--x', expected a list of"),
        ("reached_by.mpirun_args", [1], "reached_by.mpirun_args[0] is 1, expected a text"),
        ("launched_from.pid", 1 << 31, "launched_from.pid is 2147483648, expected a whole number from 0 to"),
        ("launched_from", None, "launched_from is None, expected an object"),
    ],
)
def test_a_wrong_value_is_named_with_what_was_expected(folder, path, value, expected):
    write(folder, at(tuple(int(word) if word.isdigit() else word for word in path.split(".")), value))
    message = refusal(read, folder)
    assert message.startswith(f"{folder}/job.json") and expected in message


@pytest.mark.parametrize("name", ["job", "mark", "launcher", "launched_from", "reached_by", "hosts"])
def test_a_missing_field_is_named(folder, name):
    write(folder, {key: value for key, value in RECORD.items() if key != name})
    assert f"it lacks the field '{name}'" in refusal(read, folder)


def test_options_of_the_command_line_take_the_place_of_recorded_ones(folder):
    write(folder, at(("reached_by", "mpirun"), "./mpirun"))
    found = read(folder, mpirun="/usr/bin/mpirun", ssh_port=7)
    assert (found.options.mpirun, found.options.ssh_port, found.options.ssh) == ("/usr/bin/mpirun", 7, "system")


def test_what_the_launcher_records_is_read_again(folder, monkeypatch):
    """Paths that were given relative to the launcher's folder lead to the same files from any other."""
    monkeypatch.chdir(folder)
    way = {"ssh": "system", "ssh_port": 2222, "identity": "key", "mpirun": "./mpirun", "mpirun_args": ("-v",)}
    given = AllOptions(launcher="mpi", host_ip="::1", **way)
    where = {"hostname": "a.b", "user": "x@y", "port": 3, "interface": "eth0.1"}
    hosts = [Host("a", "10.0.0.1", "/usr/bin/python3", **where), Host("b")]
    supervisor = Supervisor(Job("name", "name-0", ("true",), 2, 2, "/", ()), hosts, Limits())
    write(folder, record.record(supervisor, "0", given, 0.0, None))
    found = read(folder)
    place = f"{folder}/job.json: hosts"
    assert found.hosts == tuple(replace(host, where=f"{place}[{number}]") for number, host in enumerate(hosts))
    expected = replace(given, launcher="", identity=f"{folder}/key", mpirun=f"{folder}/mpirun")
    assert (found.options, found.cluster, found.ended) == (expected, "mpi", False)
    assert found.launcher == Launcher(platform.node(), os.getpid(), process(os.getpid()).start, boot_id())
    write(folder, record.record(supervisor, "0", AllOptions(), 0.0, 1.0))
    assert read(folder).options == AllOptions() and read(folder).ended


# -- the launcher's process --------------------------------------------------------------------------------------------

SLEEP = "import os, sys, time; os.open(sys.argv[1], os.O_RDONLY); print(flush=True); time.sleep(600)"


@pytest.fixture
def sleeper(folder: Path) -> Iterator[subprocess.Popen]:
    """A process that has the folder open, as a launcher has."""
    command = [sys.executable, "-c", SLEEP, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout and child.stdout.readline()
        yield child
        child.kill()


def test_a_pid_is_a_launcher_if_start_time_and_folder_match(folder, sleeper, tmp_path):
    found = process(sleeper.pid)
    assert found
    right = Launcher(platform.node(), sleeper.pid, found.start, boot_id())
    for theirs in (right, Launcher(platform.node(), sleeper.pid)):  # the second as a record of 0.4 has it
        launcher = visit.running_launcher(theirs, folder)
        assert launcher, theirs
        assert (launcher.pid, launcher.start) == (found.pid, found.start)
    others = [{"start": found.start + 1}, {"boot_id": "of an earlier boot"}, {"host": "elsewhere"}]
    others += [{"pid": pid} for pid in (os.getpid(), 0, 1 << 30)]
    for wrong in others:
        assert visit.running_launcher(replace(right, **wrong), folder) is None, wrong
    assert visit.running_launcher(right, tmp_path) is None, "another job's folder"
    assert visit.running_launcher(right, tmp_path / "missing") is None
    sleeper.kill()
    wait_for(lambda: process(sleeper.pid).state == "Z", "the end of the process")
    assert visit.running_launcher(right, folder) is None


@pytest.fixture
def running(launcher):
    """A job of one process that runs, and is recorded."""
    return launcher.ready(1, 0, "--job", "fit", "sh", "-c", "echo ready; exec sleep 600")


def test_killing_a_job_spares_a_later_process_with_the_launchers_pid(running):
    """Of a launcher that was killed, and whose pid another program of this user has now."""
    running.process.kill()
    running.process.wait()
    with subprocess.Popen(["sleep", "600"]) as bystander:
        record = running.record
        record["launched_from"]["pid"] = bystander.pid
        write(running.logs, record)
        done = run("job_main", "kill", running.logs, cwd=running.logs)
        assert "0 processes left on 1 host" in done.stderr, done
        assert "the launcher" not in done.stderr and bystander.poll() is None
        bystander.kill()


@pytest.mark.parametrize("old", [False, True], ids=["new record", "record of 0.4"])
def test_killing_a_job_ends_its_launcher(running, old):
    record, pid = running.record, running.process.pid
    here = {"host": platform.node(), "pid": pid, "start": process(pid).start, "boot_id": boot_id()}
    assert record["launched_from"] == here
    if old:
        del record["launched_from"]["start"], record["launched_from"]["boot_id"]
        write(running.logs, record)
    (running.logs / "killed").symlink_to(running.folder / "elsewhere")
    done = run("job_main", "kill", running.logs, cwd=running.logs)
    assert "the launcher of job fit has ended it\n" in done.stderr, done
    assert running.wait().code == 143
    assert not (running.folder / "elsewhere").exists(), "no link is followed"


def test_killing_a_job_of_root_is_refused(folder):
    """Its record may be read, because root is trusted, but its folder cannot be written."""

    def kill() -> None:
        os.setgroups([])
        os.setgid(USER)
        os.setuid(USER)
        with pytest.raises(LaunchError, match="/killed: Permission denied"):
            visit.kill(AllOptions(target=str(folder)), print)

    if os.geteuid():
        pytest.skip("a record of root needs root")
    with sticky_folder() as shared:
        folder = folder.rename(shared / "fit")
        with traced(kill) as process_of_user:
            assert process_of_user.run() == 0
        assert os.listdir(folder) == ["job.json"]
