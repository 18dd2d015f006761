"""What users get wrong, through the front door: exit code, what the message names, and that nothing is left or lost.

Every message says what is wrong, where (host, file:line), what was expected and the fix, for every host that it is
wrong on; nothing has run, no file has changed, and the launcher ends soon, however long a host keeps silent.
"""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from launch.cli import main
from tests.cluster.launching import ROOT_MAY_RUN_MPI, Front, Launched, Result, way
from tests.cluster.testbed import Testbed
from tests.scripts import executable
from tests.waiting import wait_for

USER, FAULT, NOT_EXECUTABLE, NOT_FOUND, INTERRUPTED = 2, 125, 126, 127, 130  # exit codes
SOON = 20.0  # s; a fraction of one on an idle machine
PATIENCE = 4  # s, of --connect-timeout where a host keeps silent and others need a moment for their login
GIVEN_UP = PATIENCE + 10.0  # s; a silent host holds ssh for 127 s, and Paramiko for 15 s
PROGRAM = "import os\nopen('ran-' + os.uname().nodename, 'w').close()\n"
ALL = ("-n", 3, "-s", 0, "--hosts", "h1,h2,h3")
CHANNELS = ("paramiko", pytest.param("system", marks=pytest.mark.thorough))


class Bad(Front):
    """Asserts what holds for every mistake."""

    def __init__(self, testbed: Testbed, folder: Path):
        super().__init__(testbed, folder)
        self.program = self.script(PROGRAM)

    def file(self, name: str, content: str | bytes, mode: int = 0o644) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        path.chmod(mode)
        return path

    def refused(
        self, code: int, words: list[str], *arguments: object, seconds: float = SOON, env: dict[str, str] | None = None
    ) -> Result:
        """Launch with `arguments`, which ends within `seconds` with `code` and with `words` on standard error."""
        before = self.files()
        done = self.run(*arguments, env=env)
        self.check(done, code, words, seconds)
        assert self.files() == before
        return done

    def check(self, done: Result, code: int, words: list[str], seconds: float) -> None:
        assert done.code == code, done
        for word in words:
            assert word in done.err, f"{word!r} is not in: {done}"
        assert "Traceback" not in done.err + done.out, done
        assert done.seconds < seconds, done
        lines = done.err.splitlines()
        if lines[0].startswith("job "):  # the hosts were asked
            assert lines[-1].startswith("0 processes left on "), done
        else:
            assert lines[0].startswith("dmltrain-launch: error: "), done
            assert not (self.folder / "logs").exists(), "there was no job yet"
        self.nothing_left()

    def nothing_left(self) -> None:
        def left() -> list[str]:
            found = [(host, each) for host in self.testbed.hosts for each in self.testbed.processes(host)]
            return [f"{host}: {each}" for host, each in found if each.state not in "Tt"]  # a frozen host's own

        wait_for(lambda: not left(), lambda: f"the end of {left()}", 60.0)  # an ssh waits for a silent host for 127 s

    def files(self) -> dict[str, bytes]:
        """All of the user's files: as there were, so none is `ran-*`."""
        found = {str(path.relative_to(self.folder)): path for path in self.folder.rglob("*") if path.is_file()}
        return {name: path.read_bytes() for name, path in found.items() if not name.startswith("logs")}

    def ran(self) -> set[str]:
        """The hosts that the program has run on."""
        return {path.name.removeprefix("ran-") for path in self.folder.glob("ran-*")}


@pytest.fixture
def bad(testbed: Testbed, tmp_path: Path) -> Bad:
    return Bad(testbed, tmp_path)


@pytest.fixture
def rebooted(testbed: Testbed):
    """`rebooted(host)`: whatever is mounted and configured on it is gone after the test."""
    hosts: list[str] = []
    yield hosts.append
    testbed.kill(*hosts)


def on(testbed: Testbed, host: str, *command: object) -> None:
    done = testbed.run(host, [str(word) for word in command])
    assert done.returncode == 0, done


# -- what is wrong before any host is asked ------------------------------------------------------------------

EXAMPLE = "hosts.example explains"
# name: (files, arguments, what the message says)
MISTAKES: dict[str, tuple[dict[str, str | bytes], list[object], list[str]]] = {
    "no such hosts file": ({}, ["-n", 2, "-H", "absent"], ["absent: no such file", EXAMPLE, "--hosts h1,h2"]),
    "empty hosts file": ({"hosts": ""}, ["-n", 2, "-H", "hosts"], ["hosts: no hosts", "h1 slots=2"]),
    "hosts file of comments": ({"hosts": "# h1\n\n"}, ["-n", 2, "-H", "hosts"], ["hosts: no hosts"]),
    "hosts file that is a folder": ({}, ["-n", 2, "-H", "."], [". is a folder", EXAMPLE]),
    "binary hosts file": ({"hosts": b"h1\nh2 \x7fELF\0\n"}, ["-n", 2, "-H", "hosts"], ["hosts:2: binary", EXAMPLE]),
    "hosts file in another encoding": (
        {"hosts": b"h1\n# gr\xfcn\n"},
        ["-n", 2, "-H", "hosts"],
        ["hosts:2: byte 0xfc is not UTF-8", EXAMPLE],
    ),
    "unknown attribute": (
        {"hosts": "h1\n\nh2 slot=2\n"},
        ["-n", 2, "-H", "hosts"],
        ["hosts:3: unknown attribute 'slot'", "did you mean slots?"],
    ),
    "wrong value": ({"hosts": "h1 slots=two\n"}, ["-n", 2, "-H", "hosts"], ["hosts:1: slots=two", "1 or more"]),
    "duplicate host": (
        {"hosts": "h1\nh2\nh1\n"},
        ["-n", 2, "-H", "hosts"],
        ["hosts:3: h1 is already given at hosts:1", "slots="],
    ),
    "duplicate in --hosts": ({}, ["-n", 2, "--hosts", "h1,h1"], ["--hosts: h1 is given twice", "h1:2"]),
    "--hosts with a gap": ({}, ["-n", 2, "--hosts", "h1,,h2"], ["--hosts h1,,h2: a name is missing"]),
    "two lists": (
        {"hosts": "h1\n"},
        ["-n", 1, "-H", "hosts", "--hosts", "h1"],
        ["-H and --hosts", "remove one of them"],
    ),
    "--include of an unknown host": (
        {},
        ["-n", 2, "--hosts", "h1,h2", "--include", "h7"],
        ["--include h7: no host with that name", "h1, h2"],
    ),
    "--exclude of all hosts": (
        {},
        ["-n", 2, "--hosts", "h1,h2", "--exclude", "h*"],
        ["--exclude h* excludes every host: h1, h2"],
    ),
    "-n 0": ({}, ["-n", 0, "--hosts", "h1"], ["-n is 0", "1 or more"]),
    "no -n": ({}, ["--hosts", "h1"], ["-n/--num-workers is missing", "-n 2 -s 2 train.py"]),
    "more servers than slots": (
        {"hosts": "h1 slots=2\nh2 slots=2\n"},
        ["-n", 2, "-s", 6, "-H", "hosts"],
        ["-s 6: the hosts have slots for 4 servers: h1 2, h2 2", "increase slots= or reduce"],
    ),
    "more workers than slots": (
        {},
        ["-n", 6, "-s", 2, "--hosts", "h1:2,h2:3"],
        ["-n 6: the hosts have slots for 5 workers: h1 2, h2 3", "increase slots= or reduce"],
    ),
    "hosts for --launcher local": (
        {"hosts": "h1\n"},
        ["--launcher", "local", "-n", 1, "-H", "hosts"],
        ["--launcher local", "(hosts)", "remove --launcher, or use --launcher ssh"],
    ),
    "ssh without hosts": ({}, ["--launcher", "ssh", "-n", 1], ["no hosts given", "-H FILE", "--hosts a,b"]),
    "user for mpirun": (
        {"hosts": "h1\nanna@h2\n"},
        ["--launcher", "mpi", "-n", 2, "-H", "hosts"],
        ["hosts:2: mpirun takes no user", "~/.ssh/config", "Host h2", "User anna"],
    ),
    "port for mpirun": (
        {"hosts": "h1:2222\n"},
        ["--launcher", "mpi", "-n", 2, "-H", "hosts"],
        ["hosts:1: mpirun takes no user and no port for h1", "Host h1", "Port 2222"],
    ),
    "relative --sync-dst-dir": (
        {},
        [*ALL, "--sync-dst-dir", "copy"],
        ["--sync-dst-dir", "'copy'", "starts with / or ~/"],
    ),
    "unknown option in --config": (
        {"job.yaml": "num-workers: 2\nhosts: h1,h2\nnum-server: 3\n"},
        ["--config", "job.yaml"],
        ["job.yaml:3: unknown option 'num-server'", "num-servers?"],
    ),
    "no such key": ({}, [*ALL, "--identity", "absent"], ["the key absent does not exist"]),
}


@pytest.mark.parametrize("name", ["binary hosts file", "no -n"])
def test_what_needs_no_host_to_be_seen_is_refused_at_once(bad: Bad, name: str):
    files, arguments, words = MISTAKES[name]
    for path, content in files.items():
        bad.file(path, content)
    done = bad.refused(USER, words, *arguments, bad.program)
    assert not done.out


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named_with_its_place_and_a_fix(tmp_path: Path, monkeypatch, capsys, name: str):
    files, arguments, words = MISTAKES[name]
    for path, content in files.items():
        (tmp_path / path).write_bytes(content.encode() if isinstance(content, str) else content)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main([str(each) for each in ("--log-dir", "logs", *arguments, "program.py")])
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (USER, "") and err.startswith("dmltrain-launch: error: ")
    assert [word for word in words if word not in err] == []
    assert {path.name for path in tmp_path.iterdir()} == {*files}, "there was no job yet"


# -- hosts that cannot be reached ----------------------------------------------------------------------------


@pytest.mark.parametrize("ssh", CHANNELS)
def test_every_host_that_is_down_refuses_or_is_unknown_is_reported(bad: Bad, ssh: str):
    bad.testbed.kill("h3")
    bad.testbed.kill_sshd("h4")
    bad.file("hosts", "h1\nnowhere.invalid\nh2\nh3\nh4\n")
    words = [
        "nowhere.invalid (hosts:2): ",
        "correct the name in the hosts file",
        "h3 (hosts:4): ",
        "is the host up and on this network?",
        "h4 (hosts:5): ",
        "port 22: Connection refused; is sshd running there",
        "never reached: nowhere.invalid, h3, h4",
    ]
    arguments = ["-n", 5, "-s", 0, "-H", "hosts", "--ssh", ssh, "--connect-timeout", PATIENCE, bad.program]
    done = bad.refused(USER, words, *arguments, seconds=GIVEN_UP)
    assert "h1 (hosts" not in done.err and "h2 (hosts" not in done.err, "these are well"
    assert done.err.count("(hosts:") == 3, "each once"


@pytest.fixture
def dark(testbed: Testbed) -> str:
    """An address that swallows what is sent to it."""
    address = "10.99.0.77"
    neighbour = ["ip", "neigh", "replace", address, "lladdr", "02:99:00:00:00:77", "dev", "eth0", "nud", "permanent"]
    on(testbed, "login", *neighbour)
    yield address
    on(testbed, "login", "ip", "neigh", "delete", address, "dev", "eth0")


@pytest.mark.thorough
@pytest.mark.parametrize("ssh", CHANNELS)
def test_an_address_where_nothing_answers_is_given_up_at_the_deadline(bad: Bad, dark: str, ssh: str):
    bad.file("hosts", f"h1\ndark hostname={dark}\n")
    words = ["dark (hosts:2): ", f"within {PATIENCE} s", "is the host up and on this network?", "--connect-timeout"]
    arguments = ["-n", 2, "-s", 0, "-H", "hosts", "--ssh", ssh, "--connect-timeout", PATIENCE, bad.program]
    done = bad.refused(FAULT, words, *arguments, seconds=GIVEN_UP)
    assert done.seconds > PATIENCE, "it was given its time"


@pytest.mark.parametrize("ssh", CHANNELS)
def test_an_sshd_that_accepts_and_never_answers_is_given_up_at_the_deadline(bad: Bad, ssh: str):
    bad.testbed.freeze("h2")
    words = ["h2 (--hosts): ", f"within {PATIENCE} s", "is the host up", "never reached: h2"]
    arguments = [*ALL, "--ssh", ssh, "--connect-timeout", PATIENCE, bad.program]
    bad.refused(FAULT, words, *arguments, seconds=GIVEN_UP)


def connecting(bad: Bad, dark: str) -> bool:
    """Whether `login` waits for an answer of the dark address."""
    tables = bad.testbed.run("login", ["cat", "/proc/net/tcp"]).stdout.splitlines()
    remote = socket.inet_aton(dark)[::-1].hex().upper() + ":0016"
    return any(line.split()[2:4] == [remote, "02"] for line in tables)  # 02: SYN_SENT


def interrupt(launched: Launched) -> Result:
    began = time.monotonic()
    launched.process.send_signal(signal.SIGINT)
    done = launched.wait()
    return Result(done.code, done.out, done.err, time.monotonic() - began)


@pytest.mark.parametrize(
    "name", ["ssh", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("ssh-system", "open-mpi", "mpich"))]
)
def test_ctrl_c_does_not_wait_for_a_host_that_does_not_answer(bad: Bad, dark: str, name: str):
    with (bad.testbed.dot_ssh / "config").open("a") as config:
        config.write(f"Host dark\n    HostName {dark}\n    User root\n")
    launched = bad.start(*way(name, "h1,dark"), "-n", 2, "-s", 0, "--connect-timeout", 60, bad.program)
    wait_for(lambda: connecting(bad, dark), f"a connection to the dark; {launched.err}")
    bad.check(interrupt(launched), INTERRUPTED, ["the launcher got SIGINT", "never reached: ", "dark"], 5.0)
    assert not bad.ran()


@pytest.mark.thorough
def test_ctrl_c_ends_a_proxy_command_that_looks_at_nothing(bad: Bad):
    with (bad.testbed.dot_ssh / "config").open("a") as config:
        config.write("Host behind\n    ProxyCommand sleep 60\n")
    launched = bad.start("-n", 2, "-s", 0, "--hosts", "h1,behind", "--connect-timeout", 60, bad.program)
    wait_for(lambda: any(each.name == "sleep" for each in bad.testbed.processes("login")), "the ProxyCommand")
    bad.check(interrupt(launched), INTERRUPTED, ["the launcher got SIGINT", "never reached: ", "behind"], 5.0)


@pytest.mark.thorough
@pytest.mark.parametrize("ssh", CHANNELS)
def test_a_busy_sshd_is_asked_again(bad: Bad, rebooted: Callable, ssh: str):
    """Four hosts behind one whose sshd takes one login at a time, and is kept busy for a second."""
    rebooted("h1")
    with (bad.testbed.layout.own("h1") / "sshd_config").open("a") as config:
        config.write("MaxStartups 1\n")
    bad.testbed.kill_sshd("h1")
    bad.testbed.start_sshd("h1")
    path = bad.testbed.dot_ssh / "config"
    path.write_text("Match originalhost h2,h3,h4,h5\n    ProxyJump h1\n" + path.read_text())
    log = bad.testbed.layout.own("h1") / "sshd.log"
    said_before = log.read_text().count("MaxStartups")
    hold = "import socket, time; s = socket.create_connection(('h1', 22)); s.recv(99); print('held', flush=True)"
    holder = bad.testbed.start("login", [sys.executable, "-c", f"{hold}; time.sleep(1.5)"], stdout=subprocess.PIPE)
    assert holder.stdout.readline() == b"held\n"
    done = bad.run("-n", 4, "-s", 0, "--hosts", "h2,h3,h4,h5", "--ssh", ssh, "--connect-timeout", 30, bad.program)
    holder.wait()
    holder.stdout.close()
    assert done.code == 0, done
    assert bad.ran() == {"h2", "h3", "h4", "h5"}
    assert log.read_text().count("MaxStartups") > said_before, "sshd has refused somebody"


# -- keys ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ssh", CHANNELS)
def test_a_refused_key_is_reported_for_every_host(bad: Bad, ssh: str):
    (bad.testbed.dot_ssh / "authorized_keys").write_text("")
    words = [f"h{number} (--hosts): " for number in (1, 2, 3)]
    fix = ["ssh-copy-id", "id_ed25519" if ssh == "paramiko" else "Permission denied"]
    bad.refused(USER, [*words, *fix], *ALL, "--ssh", ssh, bad.program)


@pytest.mark.thorough
@pytest.mark.parametrize("ssh", CHANNELS)
def test_a_changed_host_key_is_refused_whatever_is_asked_for(bad: Bad, ssh: str):
    old = fingerprint(bad.testbed, "h2")
    bad.testbed.change_host_key("h2")
    words = [
        "h2 (--hosts): its host key has changed",
        fingerprint(bad.testbed, "h2"),
        old,
        "/.ssh/known_hosts:",
        "ssh-keygen -f ",
        "10.99.0.2",
    ]
    done = bad.refused(USER, words, *ALL, "--ssh", ssh, "--accept-new-host-keys", bad.program)
    assert "h1 (--hosts)" not in done.err and "h3 (--hosts)" not in done.err


def fingerprint(testbed: Testbed, host: str) -> str:
    public = testbed.layout.own(host) / "ssh_host_ed25519_key.pub"
    return subprocess.run(["ssh-keygen", "-lf", public], capture_output=True, text=True, check=True).stdout.split()[1]


@pytest.mark.thorough
@pytest.mark.parametrize("ssh", CHANNELS)
def test_an_unknown_host_key_is_accepted_once_and_then_known(bad: Bad, ssh: str):
    known = bad.testbed.dot_ssh / "known_hosts"
    lines = known.read_text().splitlines(keepends=True)
    known.write_text("".join(line for line in lines if not line.startswith(("h2,", "h3,"))))
    words = [f"{host} (--hosts): its host key is not known here" for host in ("h2", "h3")]
    words += ["--accept-new-host-keys", fingerprint(bad.testbed, "h2") if ssh == "paramiko" else "ssh h2 once"]
    bad.refused(USER, words, *ALL, "--ssh", ssh, bad.program)
    accepted = bad.run(*ALL, "--ssh", ssh, "--accept-new-host-keys", bad.program)
    assert accepted.code == 0 and bad.ran() == {"h1", "h2", "h3"}, accepted
    assert bad.run(*ALL, "--ssh", ssh, bad.program).code == 0


# -- Python --------------------------------------------------------------------------------------------------

OLD = """import sys
sys.version_info = (3, 6, 9)
exec(sys.argv[sys.argv.index("-c") + 1])
"""


@pytest.mark.parametrize("ssh", CHANNELS)
def test_a_host_without_its_configured_python_is_named(bad: Bad, ssh: str):
    two = bad.file("old/python2", "#!/bin/sh\necho Unknown option: -I >&2\nexit 2\n", 0o755)
    old = executable(bad.folder / "old/python3", OLD, "-I")
    plain = bad.file("old/plain", "", 0o644)
    bad.file("hosts", f"h1 python=/opt/none/python3\nh2 python={old}\nh3 python={two}\nh4 python={plain}\nh5\n")
    words = [
        "h1 (hosts:1): /opt/none/python3 was not found there",
        f"h2 (hosts:2): {old} there is Python 3.6, too old",
        f"h3 (hosts:3): {two} there is Python 2, too old",
        f"h4 (hosts:4): {plain} there cannot be executed",
        "install Python 3.8 or later there, or give its path with python=PATH in the hosts file",
    ]
    done = bad.refused(USER, words, "-n", 5, "-s", 0, "-H", "hosts", "--ssh", ssh, bad.program)
    assert "h5 (hosts" not in done.err


@pytest.mark.thorough
@pytest.mark.parametrize("ssh", CHANNELS)
def test_a_host_that_has_no_python_at_all_is_named(bad: Bad, rebooted: Callable, ssh: str):
    rebooted("h2")
    with (bad.testbed.layout.own("h2") / "sshd_config").open("a") as config:
        config.write("SetEnv PATH=/nowhere\n")
    bad.testbed.kill_sshd("h2")
    bad.testbed.start_sshd("h2")
    on(bad.testbed, "h2", "mount", "-t", "tmpfs", "tmpfs", Path(sys.executable).parent)
    words = ["h2 (--hosts): python3 was not found there", "install Python 3.8 or later", "python=PATH"]
    bad.refused(USER, words, *ALL, "--ssh", ssh, bad.program)


def virtual(bad: Bad, name: str, **packages: str) -> Path:
    """A Python in an environment of its own that has these packages, by version; its path."""
    library = f"{name}/lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    bad.file(f"{name}/pyvenv.cfg", f"home = {Path(sys.executable).resolve().parent}\n")
    for package, version in packages.items():
        bad.file(f"{library}/{package}/__init__.py", f"__version__ = {version!r}\n")
        bad.file(f"{library}/{package}-{version}.dist-info/METADATA", f"Name: {package}\nVersion: {version}\n")
    (bad.folder / name / "bin").mkdir()
    python = bad.folder / name / "bin/python"
    python.symlink_to(Path(sys.executable).resolve())
    return python


def test_missing_modules_are_reported_with_the_command_that_installs_them(bad: Bad):
    having, lacking = virtual(bad, "having", torch="2.0"), virtual(bad, "lacking")
    script = bad.script(f"import torch\n{PROGRAM}", "train.py")
    bad.file("hosts", f"h1 python={having}\nh2 python={lacking}\nh3 python={lacking}\n")
    told = f"lacks torch, which the script imports; {lacking} -m pip install 'dmltrain[torch]'"
    words = [f"h2: {lacking} (", f"h3: {lacking} (", told, "python= in the hosts file"]
    done = bad.refused(USER, words, "-n", 3, "-s", 0, "-H", "hosts", script)
    assert "h1: " not in done.err and done.err.count(told) == 2


AHEAD = """import os, sys, time
if "dmltrain-agent" not in sys.argv:
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
right = time.time
time.time = lambda: right() + 90
exec(sys.argv[sys.argv.index("-c") + 1])
"""


@pytest.mark.thorough
def test_a_wrong_clock_and_unlike_versions_are_warnings(bad: Bad):
    ahead = executable(bad.folder / "ahead", AHEAD, "-I")
    one, two = virtual(bad, "one", mxnet="1.9.1"), virtual(bad, "two", mxnet="2.0")
    bad.file("hosts", f"h1 python={ahead}\nh2 python={one}\nh3 python={two}\n")
    done = bad.run("-n", 3, "-s", 0, "-H", "hosts", bad.program)
    assert done.code == 0 and bad.ran() == {"h1", "h2", "h3"}, done
    warnings = [line for line in done.err.splitlines() if ": warning: " in line]
    assert any("h1: its clock is 90." in line and "NTP" in line for line in warnings), done
    unlike = [line for line in warnings if "hosts have different versions of mxnet: 1.9.1 on " in line]
    assert unlike and unlike[0].endswith("h2; 2.0 on h3; install the same version on all hosts"), done


# -- what is not there ---------------------------------------------------------------------------------------


def test_a_working_directory_that_a_host_lacks_is_named(bad: Bad):
    bad.file("hosts", "h1\nh2 workdir=/data/none\nh3\nh4 workdir=/data/no\n")
    words = [
        f"{host}: the working directory {path} does not exist; copy it there with --sync-dst-dir DIR, or set "
        "another with workdir="
        for host, path in (("h2", "/data/none"), ("h4", "/data/no"))
    ]
    bad.refused(NOT_FOUND, words, "-n", 4, "-s", 0, "-H", "hosts", bad.program)


@pytest.mark.thorough
def test_a_script_that_two_hosts_lack_is_named_with_them(bad: Bad, rebooted: Callable):
    for host in ("h2", "h3"):
        rebooted(host)
        on(bad.testbed, host, "mount", "-t", "tmpfs", "tmpfs", bad.folder)
    words = [
        f"{host}: script program.py not found (working directory {bad.folder}); copy it there with --sync-dst-dir"
        for host in ("h2", "h3")
    ]
    done = bad.refused(NOT_FOUND, words, *ALL, "program.py")
    assert "h1: " not in done.err


# what cannot be run: the exit code that a shell gives, and what the message says
PROGRAMS = {
    "no-such-program": (NOT_FOUND, ["program no-such-program not found", "PATH", "give its full path"]),
    "./absent": (NOT_FOUND, ["program ./absent not found (working directory /", "give its full path"]),
    "absent.py": (NOT_FOUND, ["script absent.py not found (working directory /", "--sync-dst-dir DIR"]),
    "./plain": (NOT_EXECUTABLE, ["/plain is not executable; chmod +x ./plain"]),
    "/etc": (NOT_EXECUTABLE, ["/etc is a folder, not a program"]),
}


@pytest.mark.parametrize(
    ("name", "program"),
    [
        ("ssh", "no-such-program"),
        ("open-mpi", "./plain"),
        *(pytest.param("ssh", each, marks=pytest.mark.thorough) for each in PROGRAMS if each != "no-such-program"),
    ],
)
def test_a_program_that_cannot_run_is_reported_for_every_host(bad: Bad, name: str, program: str):
    bad.file("plain", "#!/bin/sh\n")
    code, words = PROGRAMS[program]
    bad.refused(code, ["h1: ", "h2: ", *words], *way(name, "h1,h2"), "-n", 2, "-s", 0, program)


def test_a_copy_that_does_not_fit_is_refused_and_leaves_what_is_there(bad: Bad, rebooted: Callable):
    bad.file("large", b"x" * (2 << 20))
    place = Path("/tmp/copy")  # each host has a /tmp of its own
    for host in ("h2", "h3"):
        rebooted(host)
        on(bad.testbed, host, "mkdir", place)
        on(bad.testbed, host, "mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "tmpfs", place)
        on(bad.testbed, host, "sh", "-c", f"echo mine > {place}/kept")
    rebooted("h1")
    words = [f"not enough space in {place} on {host}: 2.0 MiB needed, 1.0 MiB free" for host in ("h2", "h3")]
    bad.refused(USER, [*words, "--sync-exclude"], *ALL, "--sync-dst-dir", place, bad.program)
    for host in ("h2", "h3"):
        assert bad.testbed.run(host, ["cat", f"{place}/kept"]).stdout == "mine\n"
        assert bad.testbed.run(host, ["ls", place]).stdout == "kept\n", "nor is half a copy there"


@pytest.mark.thorough
def test_a_copy_to_where_nothing_can_be_written_is_refused(bad: Bad, rebooted: Callable):
    for host in ("h2", "h3"):
        rebooted(host)
        on(bad.testbed, host, "mkdir", "/tmp/disk")
        on(bad.testbed, host, "mount", "-t", "tmpfs", "-o", "ro", "tmpfs", "/tmp/disk")
    rebooted("h1")
    fix = "choose another --sync-dst-dir"
    words = [f"cannot create the folder /tmp/disk/copy on {host} to copy to: Read-only" for host in ("h2", "h3")]
    bad.refused(USER, [*words, fix], *ALL, "--sync-dst-dir", "/tmp/disk/copy", bad.program)


# -- addresses and devices -----------------------------------------------------------------------------------


@pytest.mark.thorough
def test_a_missing_address_is_reported_with_the_existing_ones(bad: Bad):
    for option, value, what in (
        ("--interface", "eth7", "no address of that interface on"),
        ("--subnet", "192.0.2.0/24", "no address in it on"),
    ):
        words = [f"{option} {value}: {what} h{n}, which has 10.99.0.{n}/24 on eth0" for n in (1, 2, 3)]
        bad.refused(USER, [*words, "addr="], *ALL, option, value, bad.program)
    bad.file("hosts", "h1\nh2 addr=192.0.2.1\n")
    words = ["hosts:2: no interface of h2 has addr=192.0.2.1: the host has 10.99.0.2/24 on eth0"]
    bad.refused(USER, words, "-n", 2, "-s", 0, "-H", "hosts", bad.program)
    bad.refused(USER, ["--subnet x: expected a network such as 10.0.0.0/24"], *ALL, "--subnet", "x", bad.program)


@pytest.mark.thorough
def test_missing_gpus_are_reported(bad: Bad):
    bad.file("hosts", "h1 gpus=97\nh2\nh3 gpus=98-99\n")
    words = [
        "h1: gpus=97: there is no GPU 97; the host has ",
        "h3: gpus=98,99: there is no GPU 98, 99",
        "correct gpus=",
    ]
    bad.refused(USER, words, "-n", 3, "-s", 0, "-H", "hosts", bad.program)


@pytest.mark.thorough
def test_two_names_of_one_machine_are_reported(bad: Bad):
    words = ["h1 and 10.99.0.1 have the same address, 10.99.0.1/24 on eth0", "list one machine once, with slots="]
    # if its two agents waited for each other, it would be for the whole grace
    bad.refused(USER, words, "-n", 3, "-s", 0, "--hosts", "h1,10.99.0.1,h2", "--grace", 20, bad.program)


# -- mpirun --------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_a_missing_mpirun_is_reported_with_its_packages(bad: Bad):
    words = ["mpirun is not installed here", "openmpi-bin", "mpich", "--mpirun PATH"]
    bad.refused(NOT_FOUND, words, *ALL, "--launcher", "mpi", bad.program, env={"PATH": str(bad.folder)})
    words = ["ssh is not installed here", "openssh-client", "--ssh paramiko"]
    done = bad.run(*ALL, "--ssh", "system", bad.program, env={"PATH": str(bad.folder)})
    bad.check(done, USER, words, SOON)
    words = [f"{sys.executable} --version printed", "expected Open MPI or MPICH"]
    shutil.rmtree(bad.folder / "logs")
    bad.refused(USER, words, *ALL, "--launcher", "mpi", "--mpirun", sys.executable, bad.program)


@pytest.mark.thorough
def test_mpiruns_own_cure_for_root_is_passed_on_and_works(bad: Bad):
    where = [*way("open-mpi", "h1,h2"), "-n", 2, "-s", 0]
    environment = dict.fromkeys(ROOT_MAY_RUN_MPI, "0")
    fix = "--mpirun-args=--allow-run-as-root"
    words = [
        "h1, h2 were not reached: mpirun exited with 1",
        "has detected an attempt to run as root",
        fix,
        "OMPI_ALLOW_RUN_AS_ROOT=1 and OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
    ]
    done = bad.refused(USER, words, *where, bad.program, env=environment)
    assert done.err.count("an attempt to run as root") == 1, "once, not for every host"
    assert bad.run(*where, fix, bad.program, env=environment).code == 0
    assert bad.ran() == {"h1", "h2"}


@pytest.mark.parametrize("name", ["open-mpi", pytest.param("mpich", marks=pytest.mark.thorough)])
def test_the_output_of_mpiruns_ssh_is_passed_on(bad: Bad, name: str):
    where = [*way(name, "h1,h2"), "-n", 2, "-s", 0, "--connect-timeout", PATIENCE, bad.program]
    bad.testbed.change_host_key("h2")
    words = ["h2", "not reached", "Host key verification failed"]
    bad.refused(USER, words, *where, seconds=GIVEN_UP)
    bad.testbed.kill_sshd("h2")
    words = ["h2", "not reached", "10.99.0.2 port 22: Connection refused"]
    bad.refused(FAULT, words, *where, seconds=GIVEN_UP)


@pytest.mark.thorough
def test_a_host_that_is_down_does_not_keep_mpirun_waiting(bad: Bad):
    bad.testbed.kill("h2")
    where = [*way("open-mpi", "h1,h2"), "-n", 2, "-s", 0, "--connect-timeout", PATIENCE, bad.program]
    bad.refused(FAULT, ["h2", "not reached"], *where, seconds=GIVEN_UP)


@pytest.mark.thorough
def test_hosts_whose_python_mpirun_does_not_find_are_named(bad: Bad):
    bad.file("hosts", "h1\nh2 python=/opt/none/python3\nh3 python=/opt/no/python3\n")
    where = [*way("open-mpi", "")[:-2], "-n", 3, "-s", 0, "-H", "hosts", bad.program]
    bad.refused(USER, ["h2, h3 were not reached", "/opt/no", "python3: not found"], *where)
