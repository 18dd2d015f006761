"""Check a host's key against known_hosts files, whose format sshd(8) describes.

A listed key is accepted. A host that is listed with other keys only is refused. An unlisted host is refused, unless new
hosts are accepted: then its key is appended to the first of the user's files, under a lock and in one write. Lines of
certificate authorities are ignored: only the system's ssh (--ssh system) supports them.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import fcntl
import hashlib
import hmac
import os
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from dmltrain_launch import LaunchError
from dmltrain_launch.channels.ssh.config import SSH_PORT, Settings

FLAG = "--accept-new-host-keys"


@dataclass(frozen=True)
class Key:
    """A public host key: its type ("ssh-ed25519") and its encoding in the SSH protocol."""

    kind: str
    blob: bytes

    @property
    def fingerprint(self) -> str:
        """The fingerprint in the format of ssh."""
        return "SHA256:" + base64.b64encode(hashlib.sha256(self.blob).digest()).decode().rstrip("=")

    @property
    def line(self) -> str:
        return f"{self.kind} {base64.b64encode(self.blob).decode()}"


@dataclass(frozen=True)
class KnownHost:
    """A line of a known_hosts file."""

    marker: str  # "@revoked", "@cert-authority" or ""
    names: str
    key: Key
    path: Path
    number: int

    @property
    def where(self) -> str:
        return f"{self.path}:{self.number}"


def entries(paths: Iterable[Path]) -> list[KnownHost]:
    """The valid lines; like ssh, ignore the others."""
    listed = []
    for path in paths:
        with contextlib.suppress(OSError):
            lines = path.read_text(errors="replace").splitlines()
            listed += [entry for number, line in enumerate(lines, 1) if (entry := _entry(line, path, number))]
    return listed


def _entry(line: str, path: Path, number: int) -> KnownHost | None:
    words = line.split()
    if not words or words[0].startswith("#"):
        return None
    marker = words.pop(0) if words[0].startswith("@") else ""
    if len(words) < 3:
        return None
    try:
        return KnownHost(marker, words[0], Key(words[1], base64.b64decode(words[2], validate=True)), path, number)
    except binascii.Error:
        return None


def matches(names: str, name: str) -> bool:
    """Whether `names` matches `name`: a comma-separated list of patterns, negated with !, or one hashed name."""
    if names.startswith("|1|"):
        _, _, salt, digest = [*names.split("|"), ""][:4]
        with contextlib.suppress(binascii.Error):
            expected = hmac.new(base64.b64decode(salt), name.encode(), hashlib.sha1).digest()
            return hmac.compare_digest(expected, base64.b64decode(digest))
        return False
    patterns = [
        pattern.lower().replace("[", "[[]") for pattern in names.split(",")
    ]  # brackets are literal, not a character class
    if any(pattern.startswith("!") and fnmatchcase(name, pattern[1:]) for pattern in patterns):
        return False
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def listed_name(settings: Settings) -> str:
    """The name of the host in known_hosts."""
    name = (settings.known_as or settings.hostname).lower()
    return name if settings.known_as or settings.port == SSH_PORT else f"[{name}]:{settings.port}"


def known(settings: Settings) -> list[KnownHost]:
    """The entries of the host; like ssh, without entries for its port those of its name alone."""
    listed = entries([*settings.user_known_hosts, *settings.global_known_hosts])
    listed = [entry for entry in listed if entry.marker != "@cert-authority"]
    exact = [entry for entry in listed if matches(entry.names, listed_name(settings))]
    bare = [] if settings.known_as else [entry for entry in listed if matches(entry.names, settings.hostname.lower())]
    return exact or bare


def verify(key: Key, settings: Settings, host: str, accept_new: bool) -> None:
    """LaunchError with fingerprint and fix unless `key` is trusted. `host` names the host in messages."""
    listed = known(settings)
    same = [entry for entry in listed if entry.key == key]
    if revoked := [entry for entry in same if entry.marker == "@revoked"]:
        raise LaunchError(f"{host}: its host key {key.fingerprint} is marked as revoked in {revoked[0].where}")
    if same:
        return
    exact = [entry for entry in listed if not entry.marker and matches(entry.names, listed_name(settings))]
    if exact:
        raise LaunchError(_changed(key, exact, settings, host))
    if not accept_new:
        raise LaunchError(_unknown(key, settings, host))
    _append(key, settings, host)


def _changed(key: Key, listed: list[KnownHost], settings: Settings, host: str) -> str:
    old = next((entry for entry in listed if entry.key.kind == key.kind), listed[0])
    forget = shlex.join(["ssh-keygen", "-f", str(old.path), "-R", listed_name(settings)])
    return (
        f"{host}: its host key has changed: it sent {key.kind} {key.fingerprint}, but {old.where} has {old.key.kind} "
        f"{old.key.fingerprint}; this may be an attack (man in the middle), or the host was reinstalled: in that case "
        f"remove the old key with {forget}"
    )


def _unknown(key: Key, settings: Settings, host: str) -> str:
    port = ["-p", str(settings.port)] if settings.port != SSH_PORT else []
    scan = shlex.join(["ssh-keyscan", *port, "-t", key.kind.removeprefix("ssh-"), settings.hostname])
    if key.kind.startswith("ecdsa"):
        scan = shlex.join(["ssh-keyscan", *port, "-t", "ecdsa", settings.hostname])
    files = settings.user_known_hosts or (Path("~/.ssh/known_hosts"),)
    behind = settings.hops or settings.proxy_command or settings.known_as  # ssh-keyscan does not support these
    fix = f"add {FLAG}" if behind else f"accept it with {scan} >> {files[0]} or with {FLAG}"
    return (
        f"{host}: its host key is not known here: {listed_name(settings)} sent {key.kind} {key.fingerprint}; compare "
        f"this fingerprint with the one from the host's administrator, then {fix}"
    )


def _append(key: Key, settings: Settings, host: str) -> None:
    if not settings.user_known_hosts:
        raise LaunchError(f"{host}: its host key cannot be saved: UserKnownHostsFile is none; set it to a file")
    path = settings.user_known_hosts[0]
    name = _hashed(listed_name(settings)) if settings.hash_known_hosts else listed_name(settings)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), "r+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # other threads and other launchers may do the same at this moment
            if any(matches(entry.names, listed_name(settings)) for entry in known(settings)):
                return verify(key, settings, host, accept_new=False)
            text = file.read()
            newline = "\n" if text and not text.endswith(b"\n") else ""
            file.write(f"{newline}{name} {key.line}\n".encode())
    except OSError as error:
        raise LaunchError(f"{host}: its host key cannot be added to {path}: {error.strerror}") from None


def _hashed(name: str) -> str:
    salt = os.urandom(hashlib.sha1().digest_size)
    digest = hmac.new(salt, name.encode(), hashlib.sha1).digest()
    return f"|1|{base64.b64encode(salt).decode()}|{base64.b64encode(digest).decode()}"
