"""What users get wrong, through the front door: exit code, what the message names, and that nothing is left or lost.

Nothing has run, no file has changed, and the launcher ends soon, however long a host keeps silent. Each message itself
has a test in tests/launch.
"""

import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.launching import Front, Result, first_of, way
from tests.cluster.testbed import Testbed
from tests.waiting import wait_for

USER, FAULT, NOT_EXECUTABLE, NOT_FOUND, INTERRUPTED = 2, 125, 126, 127, 130  # exit codes
SOON = 60.0  # s; a fraction of one on an idle machine
PATIENCE = 10  # s, of --connect-timeout where a host keeps silent and others need a moment for their login
GIVEN_UP = PATIENCE + 60.0  # s; a silent host holds ssh for 127 s, and Paramiko, which says so, for 15 s
PROGRAM = "import os\nopen('ran-' + os.uname().nodename, 'w').close()\n"
ALL = ("-n", 3, "-s", 0, "--hosts", "h1,h2,h3")
CHANNELS = first_of("paramiko", "system")


class Bad(Front):
    """Asserts what holds for every mistake."""

    def __init__(self, testbed: Testbed, folder: Path):
        super().__init__(testbed, folder)
        self.program = self.script(PROGRAM)

    def refused(self, code: int, words: list[str], *arguments: object, seconds: float = SOON) -> Result:
        """Launch with `arguments`, which ends within `seconds` with `code` and with `words` on standard error."""
        before = self.files()
        done = self.run(*arguments)
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
            found = [(host, process) for host in self.testbed.hosts for process in self.testbed.processes(host)]
            return [f"{host}: {each}" for host, each in found if each.state not in "Tt"]  # a frozen host's own

        wait_for(lambda: not left(), lambda: f"the end of {left()}", 60.0)  # an ssh waits for a silent host for 127 s

    def files(self) -> dict[str, bytes]:
        """All of the user's files: as there were, so none is `ran-*`."""
        found = {str(path.relative_to(self.folder)): path for path in self.folder.rglob("*") if path.is_file()}
        return {name: path.read_bytes() for name, path in found.items() if not name.startswith("logs")}


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


# what needs no host to be seen: arguments, what the message says
MISTAKES = {
    "a binary hosts file": (["-n", 2, "-H", "hosts"], ["hosts:2: binary", "hosts.example explains"]),
    "hosts for --launcher local": (
        ["--launcher", "local", "-n", 1, "--hosts", "h1"],
        ["--launcher local", "(h1)", "remove --launcher, or use --launcher ssh"],
    ),
    "a relative --sync-dst-dir": (
        [*ALL, "--sync-dst-dir", "copy"],
        ["--sync-dst-dir", "'copy'", "starts with / or ~/"],
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_what_needs_no_host_to_be_seen_is_refused_at_once(bad: Bad, name: str):
    (bad.folder / "hosts").write_bytes(b"h1\nh2 \x7fELF\0\n")
    arguments, words = MISTAKES[name]
    assert not bad.refused(USER, words, *arguments, bad.program).out


# -- hosts that cannot be reached ----------------------------------------------------------------------------


@pytest.mark.parametrize("ssh", CHANNELS)
def test_every_host_that_is_down_refuses_or_is_unknown_is_reported(bad: Bad, ssh: str):
    bad.testbed.kill("h3")
    bad.testbed.kill_sshd("h4")
    (bad.folder / "hosts").write_text("h1\nnowhere.invalid\nh2\nh3\nh4\n")
    words = [
        *("nowhere.invalid (hosts:2): ", "correct the name in the hosts file"),
        *("h3 (hosts:4): ", "is the host up and on this network?", "h4 (hosts:5): "),
        "port 22: Connection refused; is sshd running there",
        "never reached: nowhere.invalid, h3, h4",
    ]
    arguments = ["-n", 5, "-s", 0, "-H", "hosts", "--ssh", ssh, "--connect-timeout", PATIENCE, bad.program]
    done = bad.refused(USER, words, *arguments, seconds=GIVEN_UP)
    assert "h1 (hosts" not in done.err and "h2 (hosts" not in done.err, "these are well"
    assert done.err.count("(hosts:") == 3, "each once"


@pytest.mark.parametrize("ssh", CHANNELS)
def test_an_sshd_that_accepts_and_never_answers_is_given_up_at_the_deadline(bad: Bad, ssh: str):
    bad.testbed.freeze("h2")
    words = ["h2 (--hosts): ", f"within {PATIENCE} s", "is the host up", "never reached: h2"]
    arguments = [*ALL, "--ssh", ssh, "--connect-timeout", PATIENCE, bad.program]
    done = bad.refused(FAULT, words, *arguments, seconds=GIVEN_UP)
    assert done.seconds > PATIENCE, "it was given its time"


@pytest.fixture
def dark(testbed: Testbed) -> str:
    """An address that swallows what is sent to it."""
    address = "10.99.0.77"
    neighbour = ["ip", "neigh", "replace", address, "lladdr", "02:99:00:00:00:77", "dev", "eth0", "nud", "permanent"]
    on(testbed, "login", *neighbour)
    yield address
    on(testbed, "login", "ip", "neigh", "delete", address, "dev", "eth0")


def connecting(bad: Bad, dark: str) -> bool:
    """Whether `login` waits for an answer of the dark address."""
    tables = bad.testbed.run("login", ["cat", "/proc/net/tcp"]).stdout.splitlines()
    remote = socket.inet_aton(dark)[::-1].hex().upper() + ":0016"
    return any(line.split()[2:4] == [remote, "02"] for line in tables)  # 02: SYN_SENT


@pytest.mark.parametrize("name", first_of("ssh", "ssh-system", "open-mpi", "mpich", in_ci=3))
def test_ctrl_c_does_not_wait_for_a_host_that_does_not_answer(bad: Bad, dark: str, name: str):
    with (bad.testbed.dot_ssh / "config").open("a") as config:
        config.write(f"Host dark\n    HostName {dark}\n    User root\n")
    launched = bad.start(*way(name, "h1,dark"), "-n", 2, "-s", 0, "--connect-timeout", 60, bad.program)
    wait_for(lambda: connecting(bad, dark), f"a connection to the dark; {launched.err}")
    before = time.monotonic() - launched.began
    launched.process.send_signal(signal.SIGINT)
    words = ["the launcher got SIGINT", "never reached: ", "dark"]
    bad.check(launched.wait(), INTERRUPTED, words, before + 40.0)  # less than --connect-timeout
    assert not list(bad.folder.glob("ran-*"))


# -- what is not there ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "program", "code", "said"),
    [
        ("ssh", "no-such-program", NOT_FOUND, "program no-such-program not found"),
        ("open-mpi", "./plain", NOT_EXECUTABLE, "/plain is not executable; chmod +x ./plain"),
    ],
)
def test_a_program_that_cannot_run_is_reported_for_every_host(bad: Bad, name: str, program: str, code: int, said: str):
    (bad.folder / "plain").write_text("#!/bin/sh\n")
    bad.refused(code, ["h1: ", "h2: ", said], *way(name, "h1,h2"), "-n", 2, "-s", 0, program)


def test_a_copy_that_does_not_fit_is_refused_and_leaves_what_is_there(bad: Bad, rebooted: Callable):
    (bad.folder / "large").write_bytes(b"x" * (2 << 20))
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
def test_two_names_of_one_machine_are_reported(bad: Bad):
    words = ["h1 and 10.99.0.1 have the same address, 10.99.0.1/24 on eth0", "list one machine once, with slots="]
    # if its two agents waited for each other, it would be for the whole grace
    bad.refused(USER, words, "-n", 3, "-s", 0, "--hosts", "h1,10.99.0.1,h2", "--grace", 20, bad.program)


@pytest.mark.parametrize("name", first_of("open-mpi", "mpich"))
def test_the_output_of_mpiruns_ssh_is_passed_on(bad: Bad, name: str):
    where = [*way(name, "h1,h2"), "-n", 2, "-s", 0, "--connect-timeout", PATIENCE, bad.program]
    bad.testbed.change_host_key("h2")
    words = ["h2", "not reached", "Host key verification failed"]
    bad.refused(USER, words, *where, seconds=GIVEN_UP)
    bad.testbed.kill_sshd("h2")
    words = ["h2", "not reached", "10.99.0.2 port 22: Connection refused"]
    bad.refused(FAULT, words, *where, seconds=GIVEN_UP)


@pytest.mark.thorough
def test_hosts_whose_python_mpirun_does_not_find_are_named(bad: Bad):
    (bad.folder / "hosts").write_text("h1\nh2 python=/opt/none/python3\nh3 python=/opt/no/python3\n")
    where = [*way("open-mpi", "")[:-2], "-n", 3, "-s", 0, "-H", "hosts", bad.program]
    bad.refused(USER, ["h2, h3 were not reached", "/opt/no", "python3: not found"], *where)
