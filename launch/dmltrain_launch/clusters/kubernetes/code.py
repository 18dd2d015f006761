"""--sync-dst-dir with the launcher inside: the command's folder goes to its pod as an archive in a ConfigMap.

From there it is copied to the hosts as over SSH. A ConfigMap has room for 1 MiB: for programs, not for data.
"""

from __future__ import annotations

import io
import os
import shlex
import tarfile
from pathlib import Path

from dmltrain_launch import LaunchError
from dmltrain_launch.job.options import Options
from dmltrain_launch.sync.manifest import manifest
from dmltrain_launch.terminal.log_folder import LOGS

MOST_BYTES = 1_000_000  # of the archive; the API server refuses more than 1 MiB with what is around it
KEY = "code.tar.gz"
MOUNTED, UNPACKED = "/dmltrain-code", "/tmp/dmltrain-code"  # in the launcher's pod
UNPACK = f"mkdir -p {UNPACKED} && tar -xzf {MOUNTED}/{KEY} -C {UNPACKED} && cd {UNPACKED}"


def archive(options: Options, logs: Path) -> bytes:
    """The working folder, without what --sync-exclude and .gitignore files name; b"" without --sync-dst-dir.
    LaunchError if it is too large."""
    if not options.sync_dst_dir:
        return b""
    own = logs.parent if logs.parent.name == LOGS else logs
    tree = manifest(Path.cwd(), options.sync_exclude, [own, options.sync_dst_dir])
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for index, entry in enumerate(tree.entries):
            tar.add(os.fsdecode(tree.where(index)), entry.path, recursive=False)
    size = len(packed.getvalue())
    if size > MOST_BYTES:
        raise LaunchError(
            f"--sync-dst-dir: {shlex.quote(str(Path.cwd()))} has {size / 1e6:.1f} MB when packed, and Kubernetes takes "
            f"{MOST_BYTES / 1e6:.0f} MB: leave data out with --sync-exclude, or bring them in the image or by a volume"
        )
    return packed.getvalue()
