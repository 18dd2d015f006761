"""The settings of ~/.ssh/config and /etc/ssh/ssh_config for a host, as a value.

Supported: HostName, User, Port, IdentityFile, IdentitiesOnly, ProxyJump, ProxyCommand, HostKeyAlias,
UserKnownHostsFile, GlobalKnownHostsFile, HashKnownHosts, ConnectTimeout; Host, Match and Include (ssh_config(5)).
All other keywords need the system's ssh (--ssh system).
"""

from __future__ import annotations

import getpass
import glob
import os
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from paramiko import SSHConfig
from paramiko.config import SSHConfigDict
from paramiko.ssh_exception import ConfigParseError, CouldNotCanonicalize

from dmltrain_launch import LaunchError

USER_FILE, SYSTEM_FILE = "~/.ssh/config", "/etc/ssh/ssh_config"
SSH_PORT = 22
DEFAULT_IDENTITIES = ("~/.ssh/id_ed25519", "~/.ssh/id_ecdsa", "~/.ssh/id_rsa")
DEFAULT_USER_KNOWN = "~/.ssh/known_hosts ~/.ssh/known_hosts2"
DEFAULT_GLOBAL_KNOWN = "/etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2"
INCLUDE_DEPTH = 16  # the same limit as ssh's
FIX = "or use the system's ssh with --ssh system"


@dataclass(frozen=True)
class Target:
    """A host as the user named it. A field that is "" or 0 is taken from the configuration."""

    name: str
    user: str = ""
    port: int = 0
    identity: str = ""


@dataclass(frozen=True)
class Settings:
    """How to connect to one host. `connect_timeout` in seconds, 0: not set; `hops` in the order of the path."""

    hostname: str
    port: int
    user: str
    identities: tuple[str, ...]  # paths of private keys, some of which may not exist
    identities_only: bool
    hops: tuple[str, ...]  # [user@]host[:port]
    proxy_command: str
    known_as: str  # the name in known_hosts
    user_known_hosts: tuple[Path, ...]
    global_known_hosts: tuple[Path, ...]
    hash_known_hosts: bool
    connect_timeout: float

    @property
    def destination(self) -> str:
        return f"{self.hostname} port {self.port}"


class Config:
    """The configuration files, read once; LaunchError if they are invalid."""

    def __init__(self, files: tuple[str, ...] = (USER_FILE, SYSTEM_FILE)):
        lines = [line for name in files for line in ("Host *", *_lines(Path(os.path.expanduser(name)), 0))]
        self._text = "\n".join(lines)

    def settings(self, target: Target) -> Settings:
        """The settings for `target`: the first value of each keyword, the target's own before those of files."""
        own = [("User", target.user), ("Port", target.port), ("IdentityFile", target.identity)]
        text = "\n".join(f"{keyword} {value}" for keyword, value in own if value)
        try:
            values = SSHConfig.from_text(f"{text}\n{self._text}").lookup(target.name)
            return _settings(values, bool(target.identity))
        except (ConfigParseError, CouldNotCanonicalize, ValueError, KeyError, ImportError) as error:
            raise LaunchError(f"{USER_FILE} or {SYSTEM_FILE}, for {target.name}: {error}; correct it, {FIX}") from None


def _settings(values: SSHConfigDict, given: bool) -> Settings:
    user = values.get("user") or getpass.getuser()
    hops, command = _proxy(values)
    return Settings(
        hostname=values["hostname"],
        port=int(_number(values, "port", SSH_PORT)),
        user=user,
        identities=tuple(values.get("identityfile") or map(os.path.expanduser, DEFAULT_IDENTITIES)),
        identities_only=_yes(values, "identitiesonly"),
        hops=hops,
        proxy_command=command.replace("%%", "%"),
        known_as=values.get("hostkeyalias", ""),
        user_known_hosts=_paths(values.get("userknownhostsfile", DEFAULT_USER_KNOWN)),
        global_known_hosts=_paths(values.get("globalknownhostsfile", DEFAULT_GLOBAL_KNOWN)),
        hash_known_hosts=_yes(values, "hashknownhosts"),
        connect_timeout=_number(values, "connecttimeout", 0),
    )


def _yes(values: Mapping[str, str], keyword: str) -> bool:
    return values.get(keyword, "no").lower() in ("yes", "true")


def _number(found: Mapping[str, str], keyword: str, default: float) -> float:
    try:
        return float(found.get(keyword, default))
    except ValueError:
        raise ValueError(f"{keyword} is {found[keyword]}: expected a number") from None


def _proxy(values: Mapping[str, str]) -> tuple[tuple[str, ...], str]:
    """ProxyJump as hops, and ProxyCommand. The first of the two counts; "none" switches both off."""
    for keyword, value in values.items():
        none = value is None or str(value).lower() == "none"
        if keyword == "proxyjump":
            return () if none else tuple(hop.strip() for hop in value.split(",")), ""
        if keyword == "proxycommand":
            return (), "" if none else value
    return (), ""


def _paths(value: str) -> tuple[Path, ...]:
    return tuple(Path(os.path.expanduser(word)) for word in shlex.split(value) if word != "none")


def hop(text: str) -> Target:
    """Parse [user@]host[:port] of ProxyJump; an IPv6 host may be in brackets. ValueError if it is something else."""
    rest = text.removeprefix("ssh://").rstrip("/")
    user, _, rest = rest.rpartition("@")
    name, port = rest, ""
    if rest.startswith("["):
        name, _, port = rest[1:].partition("]")
        port = port.removeprefix(":")
    elif rest.count(":") == 1:
        name, port = rest.split(":")
    return Target(name, user, int(port or 0))


def _lines(path: Path, depth: int, block: str = "Host *") -> Iterator[str]:
    """The lines of a file, with included files in place. After an Include the block that contains it continues."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"{path} cannot be read: {error}; correct it, {FIX}") from None
    for line in text.splitlines():
        keyword, _, value = line.strip().replace("=", " ", 1).partition(" ")
        if keyword.lower() == "include" and depth < INCLUDE_DEPTH:
            for included in _included(value, path):
                yield from _lines(included, depth + 1, block)
                yield block
            continue
        if keyword.lower() in ("host", "match"):
            block = line
        yield line


def _included(value: str, path: Path) -> list[Path]:
    """The files of an Include. A relative pattern is relative to /etc/ssh or ~/.ssh, depending on the file."""
    folder = Path("/etc/ssh") if path.is_relative_to("/etc/ssh") else Path(os.path.expanduser("~/.ssh"))
    patterns = [str(folder / os.path.expanduser(word)) for word in shlex.split(value)]
    return [Path(name) for pattern in patterns for name in sorted(glob.glob(pattern))]
