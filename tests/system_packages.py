#!/usr/bin/env python3
"""The system packages that the tests need: install them on Debian and Ubuntu as root; elsewhere say what is missing.

    python3 tests/system_packages.py VENV

VENV is the virtual environment that make creates. SYSTEM_PACKAGES=no installs nothing. No daemon is started: while
apt-get runs, /usr/sbin/policy-rc.d forbids it. Standard library only, Python 3.8: it runs before anything is installed.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"  # few users' own has sbin
SEARCHED = os.pathsep.join([PATH, os.environ.get("PATH", "")])
POLICY = Path("/usr/sbin/policy-rc.d")
FORBIDDEN = "#!/bin/sh\n# Temporary: tests/system_packages.py installs packages without starting daemons.\nexit 101\n"
VENV_MODULE = "python3-venv"
USER_ERROR = 2


@dataclass(frozen=True)
class Package:
    """A Debian package, known to be there by its programs and libraries, whatever has installed them."""

    name: str
    skipped: str  # what is not tested, or not done, without it
    programs: tuple[str, ...] = ()
    library: str = ""

    def present(self, path: str) -> bool:
        return all(shutil.which(program, path=path) for program in self.programs) and loads(self.library)


def loads(library: str) -> bool:
    if library:
        try:
            ctypes.CDLL(library)
        except OSError:
            return False
    return True


HOSTS = "tests on hosts made of namespaces"
PACKAGES = (
    Package("make", "every command", ("make",)),
    Package("iproute2", HOSTS, ("ip", "tc")),
    Package("openssh-server", "tests over SSH", ("sshd",)),
    Package("openssh-client", "tests over SSH", ("ssh", "ssh-keygen", "ssh-agent")),
    Package("openmpi-bin", "tests of Open MPI", ("mpirun.openmpi",)),
    Package("mpich", "tests of MPICH", ("mpirun.mpich",)),
    *(
        Package(name, "tests of Slurm", (program,))
        for name, program in (
            ("munge", "munged"),
            ("slurmctld", "slurmctld"),
            ("slurmd", "slurmd"),
            ("slurm-client", "srun"),
        )
    ),
    Package("iperf3", "the benchmark of hosts", ("iperf3",)),
    Package("procps", "tests of processes of mpirun", ("ps",)),
    Package("git", "tests of .gitignore", ("git",)),
    Package("g++", "tests of torch.compile", ("g++",)),
    Package("etcd-server", "tests of Kubernetes", ("etcd",)),
    Package("kubernetes-client", "tests of Kubernetes", ("kubectl",)),
    Package("golang-go", "the build of Kubernetes for its tests", ("go",)),
    Package("zsh", "tests of completion in zsh", ("zsh",)),
    Package("chromium", "tests of pages in a browser", ("chromium",)),
    Package("xz-utils", "tests on compressed real data", ("xz",)),
)
MXNET = (
    Package("libgomp1", "tests of MXNet", library="libgomp.so.1"),
    Package("libquadmath0", "tests of MXNet", library="libquadmath.so.0"),
)


def wanted(version: Sequence[int] = sys.version_info, machine: str = platform.machine()) -> tuple[Package, ...]:
    """MXNet has wheels for Python up to 3.11 on x86-64."""
    has_mxnet = tuple(version[:2]) < (3, 12) and machine == "x86_64"
    return PACKAGES + MXNET if has_mxnet else PACKAGES


def lacking(packages: Sequence[Package], path: str = SEARCHED) -> list[Package]:
    return [package for package in packages if not package.present(path)]


def cannot_make(venv: str) -> bool:
    """Whether the virtual environment has still to be made, and this Python lacks what makes it."""
    importlib.invalidate_caches()  # apt-get may have installed it meanwhile
    return not os.access(os.path.join(venv, "bin", "pip"), os.X_OK) and importlib.util.find_spec("ensurepip") is None


def is_debian(release: Path = Path("/etc/os-release")) -> bool:
    """Debian, Ubuntu or one made of them."""
    try:
        lines = release.read_text().splitlines()
    except OSError:
        return False
    values = [line.partition("=")[2].strip("\"'") for line in lines if line.startswith(("ID=", "ID_LIKE="))]
    words = [word for value in values for word in value.split()]
    return bool({"debian", "ubuntu"} & set(words)) and shutil.which("apt-get", path=PATH) is not None


def missing_line(packages: Sequence[Package]) -> str:
    """One line: what is missing, and what is skipped for that."""
    skipped: dict[str, list[str]] = {}
    for package in packages:
        skipped.setdefault(package.skipped, []).append(package.name)
    return "Missing: " + "; ".join(f"{', '.join(names)} (skips {what})" for what, names in skipped.items())


@contextlib.contextmanager
def no_daemons(policy: Path = POLICY) -> Iterator[None]:
    """No package may start a daemon meanwhile. A policy that is there already stays as it is."""
    try:
        with open(policy, "x") as file:
            file.write(FORBIDDEN)
    except FileExistsError:
        yield
        return
    try:
        policy.chmod(0o755)
        yield
    finally:
        policy.unlink()


def install(names: Sequence[str], apt: Sequence[str] = ("apt-get",), policy: Path = POLICY) -> bool:
    """Whether apt-get has installed them."""
    environment: Mapping[str, str] = {**os.environ, "PATH": PATH, "DEBIAN_FRONTEND": "noninteractive"}
    commands = [["update", "-qq"], ["install", "-y", "-qq", "--no-install-recommends", *names]]
    with no_daemons(policy):
        return all(subprocess.run([*apt, *command], env=environment).returncode == 0 for command in commands)


def end_on_signals() -> None:
    """So that what ends this program lets it clean up."""

    def end(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end)


def prepare(
    packages: Sequence[Package], without_venv: Callable[[], bool], installer: Callable[[Sequence[str]], bool] | None
) -> int:
    """Have `packages`, and venv if Python cannot make environments; without an `installer` say what is missing."""
    names = [*([VENV_MODULE] if without_venv() else []), *(package.name for package in packages)]
    if names and installer:
        say(f"Installing system packages: {' '.join(names)} (SYSTEM_PACKAGES=no leaves them out)")
        if not installer(names):
            say(f"apt-get could not install {' '.join(names)}: see above. SYSTEM_PACKAGES=no goes on without them")
            return USER_ERROR
    elif packages:
        say(missing_line(packages))
    if without_venv():
        say(
            f"{sys.executable} cannot make a virtual environment: its module ensurepip is missing. "
            f"On Debian and Ubuntu: apt-get install {VENV_MODULE}. Or name another Python: make PYTHON=PATH"
        )
        return USER_ERROR
    return 0


def say(line: str) -> None:
    print(line, flush=True)


def main(argv: Sequence[str]) -> int:
    end_on_signals()
    may_install = os.environ.get("SYSTEM_PACKAGES") != "no" and os.geteuid() == 0 and is_debian()
    return prepare(lacking(wanted()), lambda: cannot_make(argv[0]), install if may_install else None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
