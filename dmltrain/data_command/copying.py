"""Copies each worker's part to the worker's host by the system's ssh; an interrupted copy continues where it ended.

`dmltrain-launch --plan` says on which host each worker will run and how SSH reaches it. The host needs a shell,
cat, ls, wc and sha256sum. A copy gets its final name when its sha256 equals that of the local file. It goes only to a
folder in which no other user can replace it: by a link, or by a file of theirs that they change after the check.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path
from typing import Any

from dmltrain.base.errors import UserError
from dmltrain.base.launcher import launcher

RANK = "{rank}"
OTHER = "it arrived with other bytes than it has here"
WHOLE = "whole"
# Enters the folder $1, by its real path; or says why not. Others may not write to it, nor exchange a folder above it.
ENTER = r"""enter() {
  mkdir -p "$1" && cd -P "$1" || exit 1
  at=$(pwd -P); last=$at
  while :; do
    row=$(ls -ldn "$at") || exit 1
    set -- $row
    why=
    case $3 in 0 | "$(id -u)") ;; *) why="belongs to user $3" ;; esac
    case $1 in
      ????????w[tT]*) [ "$at" != "$last" ] || why="can be written by every user" ;;
      ????????w*) why="can be written by every user" ;;
      ?????w????[+]*) why="can be written by users of its access control list" ;;
      ?????w*) [ "$4" = "$(id -g)" ] && [ "$(id -gn)" = "$(id -un)" ] || why="can be written by the group $4" ;;
    esac
    if [ -n "$why" ]; then
      echo "$at $why (mode $1), so the file there could be another user's: use a folder that is yours alone," \
        "or chmod go-w" >&2
      exit 1
    fi
    [ "$at" != / ] || break
    at=$(dirname "$at")
  done
}
"""
NEVER_ASK = ("-o", "BatchMode=yes")


@dataclass(frozen=True)
class RemoteCopy:
    """A file of this machine and its place on a host. port 0: the SSH configuration's."""

    source: Path
    hostname: str
    user: str
    port: int
    path: str
    ssh: tuple[str, ...] = ("ssh",)  # the command, such as ssh -F config

    @property
    def login(self) -> str:
        return f"{self.user}@{self.hostname}" if self.user else self.hostname

    def __str__(self) -> str:
        return f"{self.login}:{self.path}"


def copies(placing: Sequence[str], path: str | None, sources: Sequence[Path], ssh: Sequence[str]) -> list[RemoteCopy]:
    """The copies of a .rec for each worker, with its .idx. placing: options of dmltrain-launch, on which the workers'
    hosts depend. UserError: a mistake in the options or the hosts file."""
    if not placing and path is None:
        return []
    if not {"-H", "--hosts"}.intersection(placing) or path is None:
        raise UserError("-H and --to belong together: the hosts, and the path of the part on each")
    if not path.endswith(".rec") or not path.startswith("/"):
        raise UserError(f"--to {path}: expected an absolute path that ends in .rec, for example /data/train-{RANK}.rec")
    workers = [row for row in _plan(placing, len(sources)) if row["role"] == "worker"]
    copies_of_data = [
        RemoteCopy(source, row["hostname"], row["user"], row["port"], path.replace(RANK, str(row["rank"])), tuple(ssh))
        for source, row in zip(sources, workers, strict=True)
    ]
    for rank, copy in enumerate(copies_of_data):
        if any((other.hostname, other.path) == (copy.hostname, copy.path) for other in copies_of_data[:rank]):
            raise UserError(f"--to {path}: {copy.hostname} has several workers: put {RANK} into the path")
    return [file for copy in copies_of_data for file in (copy, _index(copy))]


def _index(copy: RemoteCopy) -> RemoteCopy:
    return replace(copy, source=copy.source.with_suffix(".idx"), path=copy.path.removesuffix(".rec") + ".idx")


def _plan(placing: Sequence[str], workers: int) -> list[dict[str, Any]]:
    command = (launcher(), "--plan", "--launcher", "ssh", "--torch-env", "off", "-n", str(workers), *placing, "true")
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"{shlex.join(placing)}: {done.stderr.strip().removeprefix('dmltrain-launch: ')}")
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


def copy(target: RemoteCopy) -> None:
    """Copy one file, unless the host has it already. UserError: it does not arrive."""
    name = Path(target.path).name
    part, path = shlex.quote(f"./{name}.part"), shlex.quote(f"./{name}")
    enter = f"{ENTER}enter {shlex.quote(str(Path(target.path).parent))} && "
    with target.source.open("rb", buffering=0) as file:  # the next process reads on where this one is
        digest, size = _digest(file), file.tell()
        same = f'= "{digest}  -" ]'
        begin = f"touch {part} && wc -c < {part}"
        whole = f'[ -f {path} ] && [ "$(sha256sum < {path})" {same}'
        answer = _last_word(target, _run(target, f"{enter}if {whole}; then echo {WHOLE}; else {begin}; fi"))
        if answer == WHOLE:
            return
        first = int(answer) if int(answer) <= size else 0
        file.seek(first)
        append = f"cat {'>>' if first else '>'} {part}"
        ready, failed = f"mv {part} {path}", f"rm -f {part}; echo {OTHER} >&2; exit 1"
        _run(target, f'{enter}{append} && if [ "$(sha256sum < {part})" {same}; then {ready}; else {failed}; fi', file)


def _last_word(target: RemoteCopy, output: str) -> str:
    """The last word of the output: WHOLE, or the size of the part that the host has. A start-up file may print before
    it. UserError: it is neither, so no shell ran; another program would take the file's bytes for commands."""
    last = output.split()[-1:]
    if last and (last[0] == WHOLE or last[0].isdecimal()):
        return last[0]
    raise UserError(
        f"{target}: the host's shell did not run what it was given; does `ssh {target.login} echo hello` print hello? "
        "if not, a start-up file there, such as .bashrc or .zshenv, ends the shell or starts another one"
    )


def _digest(file: FileIO) -> str:
    digest = hashlib.sha256()
    while chunk := file.read(1 << 20):
        digest.update(chunk)
    return digest.hexdigest()


def _run(target: RemoteCopy, command: str, stdin: FileIO | None = None) -> str:
    """What the command prints on the host."""
    ssh = (*target.ssh, *NEVER_ASK, *(("-p", str(target.port)) if target.port else ()), "--", target.login, command)
    try:
        done = subprocess.run(ssh, stdin=stdin or subprocess.DEVNULL, capture_output=True)
    except FileNotFoundError:
        raise UserError(f"{target.ssh[0]} is not installed: install it to copy parts to hosts") from None
    if done.returncode:
        problem = f"exit code {done.returncode} of {command.removeprefix(ENTER)}"
        reason = done.stderr.decode(errors="replace").strip() or problem
        raise UserError(
            f"{target}: {reason}; parts are copied as the SSH configuration says and without a password: check "
            f"`ssh {target.login}`, the disk and the permissions there; then go on with --copy-only"
        )
    return done.stdout.decode(errors="replace")
