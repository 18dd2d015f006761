"""The system packages of the tests: found, installed without starting a daemon, or reported as missing."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import system_packages
from tests.scripts import shell_script
from tests.system_packages import Package, install, is_debian, lacking, missing_line, prepare, wanted
from tests.waiting import wait_for

PROGRAM = Path(system_packages.__file__)
# Notes its arguments and what policy-rc.d is at the time, in the folder that it lies in.
APT = """
folder=$(dirname "$0")
echo "$DEBIAN_FRONTEND $*" >> "$folder/asked"
cp "$folder/policy-rc.d" "$folder/seen" 2>/dev/null
[ ! -x "$folder/policy-rc.d" ] || "$folder/policy-rc.d" ssh start; echo $? >> "$folder/allowed"
"""


@pytest.fixture
def apt(tmp_path: Path):
    """`apt(more)` is an apt-get that notes what it is asked, and then does `more`."""

    def made(more: str = "") -> list[str]:
        return [str(shell_script(tmp_path / "apt-get", APT + more))]

    return made


def program(folder: Path, name: str) -> str:
    shell_script(folder / name, "")
    return str(folder)


# -- what is missing --------------------------------------------------------------------------------------------------


def test_a_package_is_present_if_all_its_programs_are_or_its_library_can_be_loaded(tmp_path: Path):
    package = Package("openssh-client", "tests over SSH", ("ssh", "ssh-keygen"))
    assert lacking([package], program(tmp_path, "ssh")) == [package]
    assert lacking([package], program(tmp_path, "ssh-keygen")) == []
    assert lacking([Package("libc6", "everything", library="libc.so.6")], str(tmp_path)) == []
    absent = Package("libabsent", "nothing", library="libabsent.so.1")
    assert lacking([absent], str(tmp_path)) == [absent]


def test_debian_and_its_derivatives(tmp_path: Path):
    path, has_apt = tmp_path / "os-release", lacking([Package("apt", "", ("apt-get",))], system_packages.PATH) == []
    assert not is_debian(path)
    for release, expected in (("ID=debian", True), ('ID=mint\nID_LIKE="ubuntu debian"', True), ("ID=fedora", False)):
        path.write_text(f"{release}\n")
        assert is_debian(path) == (expected and has_apt)


# -- installing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("existing", "answer"), [("", 101), ("#!/bin/sh\nexit 104\n", 104)])
def test_no_daemon_is_started_and_afterwards_the_policy_is_as_before(tmp_path: Path, apt, existing: str, answer: int):
    """policy-rc.d(8): 101 is action forbidden. One that is there already stays as it is."""
    policy = tmp_path / "policy-rc.d"
    if existing:
        policy.write_text(existing)
        policy.chmod(0o700)
    assert install(["one", "two"], apt(), policy)
    assert (tmp_path / "asked").read_text().splitlines() == [
        "noninteractive update -qq",
        "noninteractive install -y -qq --no-install-recommends one two",
    ]
    assert (tmp_path / "allowed").read_text().split() == [str(answer)] * 2
    if existing:
        assert policy.read_text() == existing and policy.stat().st_mode & 0o777 == 0o700
    else:
        assert not policy.exists()


def test_a_failure_is_reported_and_the_policy_is_removed(tmp_path: Path, apt):
    policy = tmp_path / "policy-rc.d"
    assert not install(["one"], apt("exit 100"), policy)
    assert (tmp_path / "seen").exists() and not policy.exists()
    assert (tmp_path / "asked").read_text().count("\n") == 1, "nothing is installed from old lists"


def test_an_interrupted_installation_leaves_no_policy(tmp_path: Path, apt):
    policy = tmp_path / "policy-rc.d"
    command = f"""
import sys
sys.path.insert(0, {str(PROGRAM.parents[1])!r})
from pathlib import Path
from tests import system_packages
system_packages.end_on_signals()
system_packages.install(["one"], {apt("exec sleep 60")!r}, Path({str(policy)!r}))
"""
    started = subprocess.Popen([sys.executable, "-c", command], start_new_session=True, stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: (tmp_path / "allowed").exists() or started.poll() is not None, "the start of apt-get")
        os.killpg(started.pid, signal.SIGTERM)
        assert started.wait(60) != 0
    finally:
        started.kill()
        started.wait()
    assert (tmp_path / "seen").exists() and not policy.exists()


# -- the program ------------------------------------------------------------------------------------------------------

SSH, SSHD = Package("openssh-client", "tests over SSH"), Package("sshd", "tests over SSH")
MPI = Package("mpich", "tests of MPICH")


NAMES = ["python3-venv", "openssh-client", "mpich"]
LISTED = "Missing: openssh-client, sshd (skips tests over SSH); mpich (skips tests of MPICH)"


@pytest.mark.parametrize(
    ("lacks_venv", "works", "packages", "code", "asked", "said"),  # `said`: what is in each line
    [
        (False, True, [], 0, [], []),
        (True, True, [SSH, MPI], 0, [NAMES], [[f"Installing system packages: {' '.join(NAMES)} (SYSTEM_PACKAGES=no"]]),
        (False, False, [SSH], 2, [NAMES[1:2]], [["Installing"], ["apt-get could not install openssh-client"]]),
        (False, None, [], 0, [], []),
        (False, None, [SSH, MPI, SSHD], 0, [], [[LISTED]]),
        (True, None, [], 2, [], [[sys.executable, "apt-get install python3-venv", "make PYTHON="]]),
    ],
)
def test_what_is_missing_is_installed_or_listed_for_who_may_not(lacks_venv, works, packages, code, asked, said, capsys):
    """`works`: whether an installation does, which also brings venv; None: this user may not install."""
    found = []

    def install(names: list[str]) -> bool:
        found.append([*names])
        return works

    def without_venv() -> bool:
        return lacks_venv and not (found and works)

    assert prepare(packages, without_venv, None if works is None else install) == code
    assert found == asked
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(said) and all(
        each in line for line, words in zip(lines, said, strict=True) for each in words
    )


def test_system_packages_no_installs_nothing(tmp_path: Path):
    """On this machine, with any missing packages."""
    command, variables = [sys.executable, PROGRAM, sys.prefix], {**os.environ, "SYSTEM_PACKAGES": "no"}
    done = subprocess.run(command, capture_output=True, text=True, env=variables)
    assert done.returncode == 0 and not done.stderr, done
    assert done.stdout == (f"{missing_line(lacking(wanted()))}\n" if lacking(wanted()) else "")
