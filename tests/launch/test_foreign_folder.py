"""Copying to folders that other users can change: real agents and attacks, as processes of different users."""

import json
import os
import re
import shutil
import stat
import struct
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dmltrain_launch import LaunchError, channels
from dmltrain_launch.agent.events import Exited, Refused
from dmltrain_launch.agent.protocol import OUTPUT, decode_event
from dmltrain_launch.channels.process import ProcessChannel
from dmltrain_launch.sync import Sync
from dmltrain_launch.sync.manifest import manifest
from tests.launch.conftest import wait_for
from tests.other_user import OTHER_USER, USER, as_user, python, shell, sticky_folder

SECONDS = 60.0  # for anything to happen, on a busy machine
MALICIOUS = "print('the code of another user')"
OWN = b"my own code net"  # what the job's own program prints


@pytest.fixture
def shared() -> Iterator[Path]:
    with sticky_folder() as folder:
        yield folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    (folder / "lib").mkdir(parents=True)
    (folder / "train.py").write_text("import lib.net\nprint('my own code', lib.net.NAME)")
    (folder / "lib/net.py").write_text("NAME = 'net'")
    return folder


class Host:
    """A host whose user is USER, with a real agent, and the launcher's side of a copy to it."""

    def __init__(self, folder: Path, accounts: bool = False):
        self.home = folder / "home"
        shell(USER, "[ -d $1 ] || mkdir -m 700 $1", self.home)
        command, text = channels.agent_command(python())
        environment = {"PATH": os.environ["PATH"], "HOME": str(self.home), "TMPDIR": str(folder)}
        before = self._with_accounts(folder) if accounts else []
        self.channel = ProcessChannel([*before, *as_user(USER, *command)], text, environment)
        self.sync: Sync | None = None
        self.printed, self.events = b"", []
        self.reader = threading.Thread(target=self._read)
        self.reader.start()
        self.send(do="job", mark=f"foreign-{os.getpid()}", host="h1", key="", grace=0.1, silence=SECONDS)

    def _with_accounts(self, folder: Path) -> list[str]:
        """The command that runs another where /etc has `folder`'s passwd and group."""
        mount = 'mount --bind "$1/passwd" /etc/passwd && mount --bind "$1/group" /etc/group && '
        command = ["unshare", "-m", "sh", "-c", mount + 'shift && exec "$@"', "sh", str(folder)]
        if subprocess.run([*command, "true"], capture_output=True).returncode:
            pytest.skip("needs the right to mount, for accounts of its own")
        return command

    def send(self, **message: Any) -> None:
        self.channel.write(json.dumps(message).encode() + b"\n")

    def _read(self) -> None:
        for kind, _, payload in channels.frames(self.channel, SECONDS):
            if kind == OUTPUT:
                self.printed += payload
                continue
            event = decode_event(payload, "h1")
            self.events.append(event)
            if self.sync:
                self.sync.take(event)

    def copy(self, source: Path, to: object) -> Sync:
        """LaunchError with the agent's refusal."""
        self.sync = Sync(source, partial(manifest, source), ["h1"])
        done = self.sync.copy("h1", str(to), self.channel.write)
        for event in self.events:
            if isinstance(event, Refused):
                raise LaunchError(event.message, event.code)
        assert done is not None
        return self.sync

    def run(self, folder: object) -> bytes:
        """What train.py prints that starts in this folder."""
        task = {"task": 0, "argv": [python(), "-B", "train.py"], "environment": {}, "workdir": str(folder)}
        self.send(do="start", unset=[], tasks=[task])
        wait_for(lambda: any(isinstance(event, (Exited, Refused)) for event in self.events), "the program's end")
        return self.printed.strip()

    def __enter__(self) -> "Host":
        return self

    def __exit__(self, *error: object) -> None:
        self.send(do="stop", grace=0.1)
        self.reader.join(SECONDS)
        self.channel.close()


@pytest.fixture
def host(shared: Path) -> Iterator[Host]:
    with Host(shared) as made:
        yield made


def test_a_folder_that_another_user_prepared_gets_no_code_into_the_job(host, source, shared):
    """The whole attack: right contents beforehand, other contents once the job's owner has copied."""
    job = shared / "job"
    shell(OTHER_USER, 'mkdir -m 777 $1; printf %s "$2" >$1/train.py; chmod 644 $1/train.py', job, "x")
    (job / "train.py").write_bytes((source / "train.py").read_bytes())  # root keeps the owner: the right hash
    try:
        host.copy(source, job)
    except LaunchError as refusal:
        assert refusal.code == 2
        owner = f"{job} on h1 belongs to another user (owner: user 2002, group: 2002, mode: 0777)"
        for fact in (owner, "must belong to user 2001 or root", "--sync-dst-dir, for example '~/job'"):
            assert fact in str(refusal)
    else:
        shell(OTHER_USER, 'printf %s "$2" >$1/train.py', job, MALICIOUS)
        assert host.run(job) == OWN


def test_the_launcher_of_root_runs_nothing_in_a_prepared_folder(launcher, shared):
    shell(OTHER_USER, 'mkdir -m 777 $1; echo "print(5)" >$1/program.py', shared / "job")
    launcher.script("print(5)\n")
    ended = launcher.run("--launcher", "local", "-n", 1, "-s", 0, "--sync-dst-dir", shared / "job", "program.py")
    assert ended.code == 2, ended
    assert f"{shared}/job on" in ended.err and "belongs to another user (owner: user 2002" in ended.err
    assert "must belong to root, and nobody else" in ended.err
    assert "Traceback" not in ended.err and not launcher.log("worker-0")


ANOTHERS, OPEN = "belongs to another user", "can be written by other users"
REFUSED = {  # how a folder is prepared, as root, whose user the job's then copies to $1/a/b; and what is refused
    "a folder above of another user": ("mkdir -p $1/a/b; chown 2002 $1/a", f"/a on h1 {ANOTHERS}"),
    "a folder above that all can write": ("mkdir -p $1/a/b; chmod 777 $1/a", f"/a on h1 {OPEN}"),
    "a folder above that a group can write": ("mkdir -p $1/a/b; chmod 775 $1/a", f"/a on h1 {OPEN}"),
    "a sticky folder of another user": ("mkdir -m 1777 $1/a; chown 2002 $1/a", f"/a on h1 {ANOTHERS}"),
    "a sticky folder": ("mkdir $1/a; mkdir -m 1777 $1/a/b", f"/a/b on h1 {OPEN}"),
    "a folder of root that all can write": ("mkdir $1/a; mkdir -m 777 $1/a/b", f"/a/b on h1 {OPEN}"),
    "a folder of ours that a group can write": (
        "mkdir $1/a; mkdir -m 770 $1/a/b; chown 2001:2001 $1/a/b",
        f"/a/b on h1 {OPEN} (owner: user 2001, group: 2001, mode: 0770)",
    ),
    "a link of another user": ("mkdir $1/c; ln -s c $1/a; chown -h 2002 $1/a", "/a on h1 is a link that belongs to an"),
    "a link into a folder of another user": ("mkdir $1/c; chown 2002 $1/c; ln -s c $1/a", "/c on h1 belongs to an"),
    "a link to a sticky folder": ("mkdir $1/a; ln -s .. $1/a/b", f" on h1 {OPEN}"),
    "a link to itself": ("ln -s a $1/a", "cannot create the folder"),
    "a folder that the user cannot enter": ("mkdir -m 700 $1/a", "/a/b on h1 to copy to: Permission denied"),
    "a file": ("touch $1/a", "/a/b on h1 to copy to: Not a directory"),
    "a folder inside of another user": (
        "mkdir -p $1/a/b/lib; chown 2001 $1/a/b; chown 2002 $1/a/b/lib",
        f"/a/b/lib on h1 or a folder above it {ANOTHERS}",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_copy_to_where_others_can_write_is_refused(host, source, shared, case):
    script, said = REFUSED[case]
    subprocess.run(["sh", "-ec", script, "sh", shared], check=True)
    with pytest.raises(LaunchError, match=re.escape(said)) as refused:
        host.copy(source, shared / "a/b")
    assert refused.value.code == 2
    assert not list(shared.rglob("train.py")), "nothing is copied"


ACCEPTED = {
    "a sticky folder": "",
    "links of root and of the user": "mkdir $1/c; ln -s $1/./c $1/a; mkdir $1/d; chown 2001 $1/d; ln -s ../d $1/c/b",
    "folders that can only be passed through": "mkdir -m 711 $1/a; mkdir $1/a/b; chown 2001 $1/a/b",
    "a folder of the user that others can read": "mkdir -p $1/a/b; chown 2001 $1/a/b",
    "a way with dots": "mkdir -p $1/a/b; chown 2001 $1/a/b; ln -s ../a/../a/./b $1/a/c; rmdir $1/a/b; mkdir $1/a/b;"
    "chown 2001 $1/a/b",
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_a_copy_to_where_only_its_user_can_write_is_private(host, source, shared, case):
    subprocess.run(["sh", "-ec", ACCEPTED[case] or ":", "sh", shared], check=True)
    host.copy(source, shared / "a/b")
    found = (shared / "a/b").stat()
    assert (found.st_uid, stat.S_IMODE(found.st_mode)) == (USER, 0o700)
    assert host.run(shared / "a/b") == OWN


def test_the_home_folder_of_the_host_is_a_place_to_copy_to(host, source):
    sync = host.copy(source, "~/deep/job")
    assert sync.hosts["h1"].folder == str(host.home / "deep/job")
    assert host.run("~/deep/job") == OWN
    assert stat.S_IMODE((host.home / "deep").stat().st_mode) == 0o755


def test_the_private_group_of_the_user_may_write(shared, source):
    """As many systems set users up: each has a group of the same name, and folders are made with mode 775."""
    (shared / "passwd").write_text("root:x:0:0::/:/bin/sh\nanna:x:2001:2001::/:/bin/sh\nbea:x:2002:2005::/:/bin/sh\n")
    cases = [("", 2001, USER, ""), ("anna", 2001, USER, ""), ("anna,bea", 2001, USER, OPEN), ("", 2005, USER, OPEN)]
    cases.append(("", 2001, 0, "belongs to root, not to you"))
    for members, gid, owner, said in cases:
        (shared / "group").write_text(f"root:x:0:\nanna:x:2001:{members}\nteam:x:2005:\n")
        place = shared / f"{members}-{gid}-{owner}"
        place.mkdir()
        os.chown(place, owner, gid)
        place.chmod(0o775)
        with Host(shared, accounts=True) as host:
            try:
                host.copy(source, place)
                assert not said, f"{members}, {gid}: accepted"
            except LaunchError as refused:
                assert said and said in str(refused), refused
                assert "must belong to anna (2001) or root" in str(refused)


def test_the_private_group_does_not_count_where_a_list_names_another_user(shared, source):
    (shared / "passwd").write_text("root:x:0:0::/:/bin/sh\nanna:x:2001:2001::/:/bin/sh\n")
    (shared / "group").write_text("root:x:0:\nanna:x:2001:\n")
    place = shared / "place"
    place.mkdir()
    os.chown(place, USER, USER)
    entries = [(1, 7, -1), (2, 7, OTHER_USER), (4, 7, -1), (16, 7, -1), (32, 5, -1)]  # linux/posix_acl_xattr.h
    try:
        text = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *entry) for entry in entries)
        os.setxattr(place, "system.posix_acl_access", text)
    except OSError:
        pytest.skip("no access control lists on this file system")
    assert stat.S_IMODE(place.stat().st_mode) == 0o775
    with Host(shared, accounts=True) as host, pytest.raises(LaunchError, match=OPEN):
        host.copy(source, place)


def test_a_folder_of_root_that_already_has_everything_is_left_alone(host, source, shared):
    shutil.copytree(source, shared / "job")
    before = (shared / "job").stat().st_ctime_ns  # of the last change of mode, owner or content
    assert host.copy(source, shared / "job").lines() == ["h1: 0 of 2 files, 0.0 MB sent"]
    assert (shared / "job").stat().st_ctime_ns == before
    assert host.run(shared / "job") == OWN


def test_a_checkpoint_of_another_user_is_replaced(host, source, shared):
    (source / "last.pt").write_text("of the job's owner")
    shell(USER, "mkdir -m 700 $1; touch $1/last.pt", shared / "job")
    os.chown(shared / "job/last.pt", OTHER_USER, OTHER_USER)
    sync = host.copy(source, shared / "job")
    assert (shared / "job/last.pt").read_text() == "of the job's owner"
    assert sync.hosts["h1"].notes == ("replaced last.pt: changed there since the last copy, or never copied there",)


def test_what_others_could_have_open_is_written_anew(host, source, shared):
    """A copy that others could enter so far: a file of theirs with the right content, and one of ours that they have
    open for writing; and a folder in which one of them is."""
    job = shared / "job"
    shell(USER, "umask 0; mkdir -m 755 $1; mkdir -m 777 $1/lib; touch $1/train.py $1/lib/net.py", job)
    for name in ("train.py", "lib/net.py"):
        (job / name).write_bytes((source / name).read_bytes())
    os.chown(job / "lib/net.py", OTHER_USER, OTHER_USER)
    late = 'cd $1/lib; exec 3>>../train.py 4>>net.py; echo ready; read go; printf "$2" >&3; printf "$2" >&4; '
    command = as_user(OTHER_USER, "sh", "-c", late + "echo >os.py; echo done", "sh", job, "\n" + MALICIOUS)
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, cwd="/", **pipes) as bad:
        assert bad.stdout.readline() == b"ready\n"
        sync = host.copy(source, job)
        out, err = bad.communicate(b"go\n")
    assert b"Permission denied" in err and not (job / "lib/os.py").exists()
    assert host.run(job) == OWN
    assert {(job / name).stat().st_uid for name in ("train.py", "lib/net.py")} == {USER}
    first, second = (note.partition(":")[0] for note in sync.hosts["h1"].notes)
    assert first.startswith(f"{job} had mode 0755 ") and second == "replaced lib/net.py"
    assert sync.lines() == ["h1: 2 of 2 files, 0.0 MB sent"]
