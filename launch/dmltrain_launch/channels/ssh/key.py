"""The user's private keys: in the SSH agent and in files. An encrypted key is unlocked once for all hosts."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import paramiko
from paramiko.pkey import PublicBlob

from dmltrain_launch import LaunchError
from dmltrain_launch.channels.ssh.config import Settings

KEY_CLASSES = (paramiko.Ed25519Key, paramiko.ECDSAKey, paramiko.RSAKey)
ATTEMPTS = 3  # ssh's default for NumberOfPasswordPrompts


class Keys:
    """Private keys by path, loaded once. `ask(question)` returns the passphrase; it raises OSError without a terminal.

    Passphrases are not kept. Unlocked keys stay in memory, so that the launcher can reconnect to a lost host.
    """

    def __init__(self, ask: Callable[[str], str]):
        self._ask = ask
        self._lock = threading.Lock()  # held while asking, so that the other hosts wait for this answer
        self._loaded: dict[str, paramiko.PKey | None] = {}  # None: encrypted
        self._refused: dict[str, LaunchError] = {}

    def offers(self, settings: Settings) -> Iterator[tuple[str, paramiko.PKey]]:
        """(description, key) in the order in which ssh tries them: first those of the SSH agent, then files."""
        files = {path: key for path in settings.identities if (key := self._load(path))}
        configured = {blob for path in settings.identities if (blob := _public_blob(path))}
        held = agent_keys()
        wanted = [key for key in held if key.asbytes() in configured]
        others = [] if settings.identities_only else [key for key in held if key.asbytes() not in configured]
        for key in (*wanted, *others):
            yield f"the agent's {key.get_name()} {key.comment or ''}".rstrip(), key
        offered = {key.asbytes() for key in held} if not settings.identities_only else {k.asbytes() for k in wanted}
        yield from ((path, key) for path, key in files.items() if key.asbytes() not in offered)

    def locked(self, settings: Settings) -> list[str]:
        """The files with encrypted keys that are not unlocked yet."""
        return [path for path in settings.identities if self._load(path) is None and path in self._loaded]

    def unlock(self, path: str) -> None:
        """Ask for the passphrase, once for all hosts; LaunchError without a terminal or if it is wrong."""
        with self._lock:
            if path in self._refused:
                raise self._refused[path]
            if self._loaded.get(path) is None:
                try:
                    self._loaded[path] = self._unlocked(path)
                except LaunchError as error:
                    self._refused[path] = error
                    raise

    def _unlocked(self, path: str) -> paramiko.PKey:
        for _ in range(ATTEMPTS):
            try:
                answer = self._ask(f"Passphrase for key {path}: ")
            except OSError:
                raise LaunchError(
                    f"key {path} is encrypted, and there is no terminal to ask for its passphrase: "
                    f"add it to an SSH agent first with ssh-add {path}"
                ) from None
            except EOFError:
                raise LaunchError(f"key {path} is encrypted, and no passphrase was given") from None
            with contextlib.suppress(paramiko.SSHException, ValueError):
                key = _read(path, answer)
                if key:
                    return key
        raise LaunchError(f"key {path} is encrypted, and {ATTEMPTS} passphrases were wrong")

    def _load(self, path: str) -> paramiko.PKey | None:
        with self._lock:
            if path not in self._loaded and Path(path).is_file():
                try:
                    key = _read(path, None)
                except paramiko.PasswordRequiredException:
                    key = self._loaded[path] = None
                if key:
                    self._loaded[path] = key
            return self._loaded.get(path)


def agent_keys() -> list[paramiko.AgentKey]:
    """The keys of the SSH agent at $SSH_AUTH_SOCK, if there is one."""
    with contextlib.suppress(paramiko.SSHException, OSError, EOFError):
        return list(paramiko.Agent().get_keys())
    return []


def _public_blob(path: str) -> bytes:
    """The public key beside a private key file. The private key may be in the SSH agent only."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        blob: bytes = PublicBlob.from_file(path if path.endswith(".pub") else f"{path}.pub").key_blob
        return blob
    return b""


def _read(path: str, passphrase: str | None) -> paramiko.PKey | None:
    """The key in a file; None if it has no usable key; PasswordRequiredException if it is encrypted."""
    locked = None
    for kind in KEY_CLASSES:
        try:
            key = kind.from_private_key_file(path, passphrase)
        except paramiko.PasswordRequiredException as error:
            locked = error
            continue
        except (paramiko.SSHException, ValueError, OSError):
            continue
        with contextlib.suppress(paramiko.SSHException, ValueError, OSError):
            key.load_certificate(f"{path}-cert.pub")
        return key
    if locked:
        raise locked
    return None
