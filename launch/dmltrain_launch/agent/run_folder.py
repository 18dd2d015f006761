"""The private folder of a job on this host."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Mapping

from dmltrain_launch.agent import Refusal


def prefix(mark: str) -> str:
    """What the names of the job's private folders begin with."""
    return f"dmltrain-{mark}."


class RunFolder:
    """The private folder (mode 0700) of a job on this host, with the job's key and certificate in files of mode
    0600."""

    def __init__(self, mark: str):
        self.prefix = prefix(mark)
        self.key_file = ""
        self.certificate_file = ""
        self.scheduler_file = ""  # its path; the file is there when the job has had more than one scheduler

    def create(self, key: str, certificate: str) -> None:
        """`certificate` may be empty."""
        try:
            folder = tempfile.mkdtemp(prefix=self.prefix)
            self.key_file = _write_secret(folder, "key", key)
            self.scheduler_file = os.path.join(folder, "scheduler")
            if certificate:
                self.certificate_file = _write_secret(folder, "certificate", certificate)
        except OSError as error:
            self.remove()
            raise Refusal(f"cannot create the job's private folder in TMPDIR or /tmp: {error.strerror}", 125) from None

    def variables(self, follows: bool) -> dict[str, str]:
        """For the job's processes. `follows`: whether the job's scheduler may change."""
        files = {"KEY": self.key_file, "CERTIFICATE": self.certificate_file}
        if follows:
            files["SCHEDULER"] = self.scheduler_file
        return {f"DMLTRAIN_{name}_FILE": file for name, file in files.items() if file or name == "KEY"}

    def follow(self, incarnation: int, address: str, port: int) -> None:
        """Tell the job's processes where its scheduler is now."""
        _put(self.scheduler_file, incarnation, {"incarnation": incarnation, "host": address, "port": port})

    def remove(self, keep: str = "") -> None:
        """Remove the job's folders, including those of a killed agent. `keep`: the path of one that stays. Names in
        TMPDIR can be anybody's: only what is this user's is touched."""
        try:
            folder = tempfile.gettempdir()
            names = os.listdir(folder)
        except OSError:  # there is no folder for temporary files, so none of the job
            return
        for name in names:
            path = os.path.join(folder, name)
            if name.startswith(self.prefix) and path != keep and _is_own_folder(path):
                with contextlib.suppress(
                    RecursionError
                ):  # a program of the job has made so many folders in one another
                    shutil.rmtree(path, ignore_errors=True)


def _is_own_folder(path: str) -> bool:
    try:
        status = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()


def _put(path: str, number: int, content: Mapping[str, object]) -> None:
    """Write the file, which is whole at any moment. `number` grows with each call."""
    part = f"{path}.{number}"
    try:
        with open(part, "w") as file:
            json.dump(content, file)
        os.replace(part, path)
    except OSError as error:
        raise Refusal(f"cannot write {path}: {error.strerror}", 125) from None


def _write_secret(folder: str, name: str, content: str) -> str:
    path = os.path.join(folder, name)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(content)
    return path
