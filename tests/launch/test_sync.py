"""Copying a folder to hosts: what is copied, what travels, what stands when it is cut off, and what is refused."""

import contextlib
import hashlib
import json
import os
import random
import shutil
import socket
import stat
import subprocess
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmltrain_launch import LaunchError
from dmltrain_launch.agent import commands, events
from dmltrain_launch.agent.copy.destination import LIST, PREFIX, Destination
from dmltrain_launch.agent.copy.receive import Receiver
from dmltrain_launch.agent.copy.safe_folder import shown
from dmltrain_launch.agent.events import Event, Refused, Wanted
from dmltrain_launch.agent.incoming import Incoming
from dmltrain_launch.agent.protocol import ProtocolError, decode_command, decode_event, encode_event
from dmltrain_launch.sync import Sync
from dmltrain_launch.sync.manifest import Manifest, Over, manifest, opened
from dmltrain_launch.sync.send import WRITE_BYTES, offer, push
from tests.descriptors import descriptors
from tests.tiers import examples
from tests.waiting import wait_for


def row(number: int, name: str, mode: int = 0o644, mtime: int = 0, content: bytes = b"abc") -> list:
    """Announces a file."""
    return [number, "file", name, mode, mtime, len(content), hashlib.sha256(content).hexdigest()]


def rows_of(source: Path) -> list[list]:
    """The rows of all entries of the folder, numbered from 10."""
    return [
        [number, entry.kind, entry.path, entry.mode, entry.mtime, entry.size, entry.sha256 or entry.target]
        for number, entry in enumerate(manifest(source).entries, 10)
    ]


def message(**facts: object) -> bytes:
    return json.dumps(facts).encode() + b"\n"


def file(entry: int, data: bytes, **more: object) -> bytes:
    """The message that a file's data follows, and the data."""
    return message(do="file", entry=entry, bytes=len(data), **more) + data


class Agent:
    """A Receiver with the loop that the agent has around it; `write` is the far end of its standard input."""

    def __init__(self, host: str = "h1", tell: Callable[[Event], object] = lambda event: None):
        self.events: list[dict] = []
        self.files: list[int] = []  # entries of which something came
        self.tell, self.host = tell, host
        self.receiver, self.incoming = Receiver(host, self._emit), Incoming()

    def _emit(self, event: Event) -> None:
        said = encode_event(event)
        self.events.append(json.loads(said))
        self.tell(decode_event(said, self.host))

    def write(self, data: bytes) -> None:
        self.incoming.feed(data)
        for each in self.incoming:
            if isinstance(each, bytes):
                self.receiver.take(each)
            elif isinstance(each, commands.File):
                self.files.append(each.entry)
                self.receiver.expect(each)
            else:
                self.receiver.begin(each)
                while self.receiver.step():
                    pass

    def last(self, event: str) -> dict:
        assert self.events[-1]["event"] == event, self.events[-1]
        return self.events[-1]


def copy(source: Path, to: Path, **options: object) -> tuple[Sync, Agent]:
    """Copy in memory to one host; the refusal's text is raised."""
    agent = Agent()
    sync = Sync(source, partial(manifest, source, **options), ["h1"])
    agent.tell = sync.take
    done = sync.copy("h1", str(to), agent.write)
    agent.receiver.finish()
    if agent.events[-1]["event"] == "refused":
        raise LaunchError(agent.events[-1]["message"], agent.events[-1]["code"])
    assert done is not None
    return sync, agent


def announce(agent: Agent, to: Path, rows: list[list]) -> dict:
    """Announce rows that no launcher of ours would make; what the agent said last."""
    agent.write(message(do="sync", to=str(to)) + message(do="entries", entries=rows, last=True))
    return agent.events[-1]


def answer(to: Path, rows: list[list]) -> dict:
    """What an agent says at last that gets such rows, and then ends."""
    agent = Agent()
    said = announce(agent, to, rows)
    agent.receiver.finish()
    return said


def tree(folder: Path) -> dict[bytes, tuple]:
    """All that a copy has to keep: kinds, contents, targets, modes, times."""
    found: dict[bytes, tuple] = {}
    for where, folders, files in os.walk(os.fsencode(folder)):
        for name in folders + files:
            if name == LIST:
                continue
            path = os.path.join(where, name)
            key, facts = os.path.relpath(path, os.fsencode(folder)), os.lstat(path)
            if stat.S_ISLNK(facts.st_mode):
                found[key] = ("link", os.readlink(path), facts.st_mtime_ns)
            elif stat.S_ISDIR(facts.st_mode):
                found[key] = ("folder",)
            else:
                with open(path, "rb") as file:
                    found[key] = ("file", file.read(), stat.S_IMODE(facts.st_mode), facts.st_mtime_ns)
    return found


def names(folder: Path) -> list[str]:
    """What is in the folder, without the list that copies keep there."""
    return sorted(name for name in os.listdir(folder) if name != os.fsdecode(LIST))


def temporary(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if name.startswith(os.fsdecode(PREFIX))]


def fill(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    return fill(folder, {"train.py": "print(1)\n", "lib/net.py": "x = 1\n", "lib/deep/a.txt": "a", "empty": ""})


@pytest.fixture
def to(tmp_path: Path) -> Path:
    """Where it is copied to: a folder that is yet to be made."""
    return tmp_path / "to"


# -- what is copied --------------------------------------------------------------------------------------------------


def test_a_copy_has_contents_links_modes_times_and_empty_folders(source, tmp_path):
    (source / "run.sh").write_text("#!/bin/sh\n")
    (source / "run.sh").chmod(0o755)
    (source / "private").write_text("key")
    (source / "private").chmod(0o600)
    os.utime(source / "train.py", ns=(1, 1_234_567_890_123_456_789))
    (source / "nothing" / "here").mkdir(parents=True)
    (source / "inside").symlink_to("lib/net.py")
    (source / "outside").symlink_to("/etc/passwd")
    (source / "folder").symlink_to("../..")
    (source / "dangling").symlink_to("no such")
    sync, agent = copy(source, tmp_path / "to" / "be" / "made")
    assert tree(tmp_path / "to" / "be" / "made") == tree(source)
    assert agent.last("synced")["files"] == 6
    assert sync.lines() == ["h1: 6 of 6 files, 0.0 MB sent"]


def test_only_what_differs_travels(source, to):
    (source / "link").symlink_to("train.py")
    copy(source, to)
    (source / "lib/net.py").write_text("y = 2\n")  # as long as before
    (source / "new").write_text("new")
    (source / "train.py").chmod(0o750)  # no reason to send it
    os.utime(source / "lib/deep/a.txt", ns=(1, 5))
    os.utime(source / "link", ns=(1, 10**18 + 9), follow_symlinks=False)
    inode = (to / "train.py").stat().st_ino
    sync, agent = copy(source, to)
    names = {entry.path for index, entry in enumerate(manifest(source).entries) if index in agent.files}
    assert names == {"lib/net.py", "new"}
    assert tree(to) == tree(source) and (to / "train.py").stat().st_ino == inode
    assert sync.progress() == (9, 9)
    assert sync.lines() == ["h1: 2 of 5 files, 0.0 MB sent"]


def test_what_else_is_at_the_destination_stays_and_what_is_no_file_gives_way_to_one_unread(source, tmp_path):
    to = fill(tmp_path / "to", {"checkpoint": "mine", "lib/own.py": "mine"})
    precious = fill(tmp_path, {"precious": "print(1)\n"}) / "precious"
    (to / "train.py").symlink_to(precious)
    os.mkfifo(to / "empty")  # to open it for reading would wait for a writer
    copy(source, to)
    assert (to / "checkpoint").read_text() == (to / "lib/own.py").read_text() == "mine"
    assert tree(to).items() >= tree(source).items() and not precious.is_symlink()


def test_sockets_and_pipes_are_skipped_with_a_note(source, tmp_path, monkeypatch):
    os.mkfifo(source / "pipe")
    monkeypatch.chdir(source)  # a socket's path is short
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as listener:
        listener.bind("socket")
        sync, _ = copy(source, tmp_path / "to")
    assert [note.partition(" is not copied")[0] for note in sync.notes] == ["pipe", "socket"]
    assert not {"pipe", "socket"} & {*os.listdir(tmp_path / "to")}


def test_the_log_folder_git_temporary_files_and_a_destination_inside_the_source_are_left_out(source, tmp_path):
    fill(source, {"logs/job/worker-0.log": "x", "logs/old/worker-0.log": "x", ".git/HEAD": "x", "sub/.git": "x"})
    (source / os.fsdecode(PREFIX + b"1")).write_text("x")
    found = manifest(source, leave_out=[source / "logs/job", "/elsewhere"])
    paths = {entry.path for entry in found.entries}
    assert {"logs", "logs/old", "logs/old/worker-0.log", "sub"} <= paths
    assert not [path for path in paths if "job" in path or ".git" in path or "dmltrain" in path]
    for _ in range(2):
        copy(source, source / "copy", leave_out=[source / "copy"])
    assert not (source / "copy" / "copy").exists()


# -- what was copied earlier -----------------------------------------------------------------------------------------


def notes(sync: Sync) -> list[str]:
    return list(sync.hosts["h1"].notes)


REMOVED = "removed {}: copied there earlier, and gone from this folder"
REPLACED = "replaced {}: changed there since the last copy, or never copied there"


def test_what_was_copied_and_is_gone_from_the_source_is_removed_and_nothing_else(source, tmp_path):
    to = fill(tmp_path / "to", {"lib/deep/a.txt": "a", "own": "mine"})  # one that a copy finds, and never copies
    (source / "link").symlink_to("train.py")
    fill(source, {"old/module.py": "old", "old/deep/b": "b", "half/c": "c"})
    assert notes(copy(source, to)[0]) == [f"{to} had mode 0755 and is private now"]
    fill(to, {"half/result": "mine"})
    for name in ("old", "half", "lib/deep"):
        shutil.rmtree(source / name)
    (source / "link").unlink()
    sync, _ = copy(source, to)
    assert notes(sync) == [REMOVED.format("half/c, link, old/deep/b, old/module.py")]
    kept = {b"half", b"half/result", b"own", b"lib/deep", b"lib/deep/a.txt"}
    assert tree(to).keys() == tree(source).keys() | kept
    assert notes(copy(source, to)[0]) == []


def test_what_is_only_left_out_now_stays(source, to):
    fill(source, {"data/big": "x", "data/new": "y", "notes.txt": "z"})
    copy(source, to)
    fill(source, {".gitignore": "data\n"})
    (source / "data/new").unlink()
    sync, _ = copy(source, to, excludes=["*.txt"])
    assert (to / "data/big").exists() and (to / "notes.txt").exists() and (to / "lib/deep/a.txt").exists()
    assert notes(sync) == [REMOVED.format("data/new")]


def test_what_has_changed_since_the_copy_is_not_removed(source, to):
    (source / "link").symlink_to("train.py")
    fill(source, {"a": "1", "b": "2", "c/d": "3"})
    copy(source, to)
    for folder in (source, to):
        for name in ("b", "link"):
            (folder / name).unlink()
        shutil.rmtree(folder / "c")
    (source / "a").unlink()
    (to / "a").write_text("5")  # as long as before
    (to / "b").mkdir()
    (to / "link").symlink_to("lib")
    (to / "c").symlink_to(source / "lib")
    sync, _ = copy(source, to)
    assert notes(sync) == ["kept a, b, c, link: gone from this folder, but changed there since the last copy"]
    assert (to / "a").read_text() == "5" and (to / "b").is_dir() and os.readlink(to / "link") == "lib"
    assert (source / "lib/net.py").exists()
    assert notes(copy(source, to)[0]) == [], "said once"


def test_a_folder_takes_the_place_of_a_file_that_was_copied_and_the_other_way_round(source, to):
    fill(source, {"one": "1", "two/inside": "2", "three": "3", "real/x": "4"})
    copy(source, to)
    (source / "one").unlink()
    shutil.rmtree(source / "two")
    fill(source, {"one/inside": "1", "two": "2"})
    (source / "three").unlink()
    (source / "three").symlink_to("real")  # through which nothing of "three" is still in the source
    copy(source, to)
    assert tree(to) == tree(source)


def test_a_file_that_changed_there_is_replaced_with_a_word(source, tmp_path):
    to = fill(tmp_path / "to", {"train.py": "from elsewhere", "lib/own.py": ""})
    assert notes(copy(source, to)[0])[1:] == [REPLACED.format("train.py")]
    (to / "lib/net.py").write_text("y = 5\n")  # as long as before
    (source / "empty").write_text("changed here")
    assert notes(copy(source, to)[0]) == [REPLACED.format("lib/net.py")]
    assert tree(to).items() >= tree(source).items()


WRITTEN = ["run/r8-0003.pt", "m-0001.params", "m-symbol.json", "r8-0002.npz", "state.server-0", "LAST.CKPT", "a\nb.pth"]


def test_a_checkpoint_that_the_job_wrote_is_never_replaced_but_one_that_is_as_it_was_copied(source, to):
    fill(source, dict.fromkeys(WRITTEN, "epoch 3 of the source") | {"run/last.pt": "epoch 3"})
    copy(source, to)
    fill(to, dict.fromkeys(WRITTEN, "epoch 9 of the job") | {"never.pt": "of the job"})
    fill(source, {"run/r8-0003.pt": "another epoch 3", "never.pt": "of the source", "run/last.pt": "epoch 9"})
    sync, agent = copy(source, to)
    (said,) = notes(sync)
    assert said.startswith("kept LAST.CKPT, 'a\\nb.pth', m-0001.params, m-symbol.json, never.pt and 3 more: ")
    assert {(to / name).read_text() for name in WRITTEN} == {"epoch 9 of the job"}
    assert len(agent.files) == 1 and (to / "run/last.pt").read_text() == "epoch 9"
    assert notes(copy(source, to)[0]) == [said], "each time"
    for name in WRITTEN:
        (to / name).unlink()
    copy(source, to)
    assert (to / "run/r8-0003.pt").read_text() == "another epoch 3"


DAMAGES = {
    "cut": lambda text: text[:-3],
    "without its end": lambda text: text[: text.rindex(b"\n", 0, -1) + 1],
    "longer": lambda text: text + b"[]\n",
    "no JSON": lambda text: text.replace(b'"', b"'", 1),
    "another format": lambda text: text.replace(b", 1]", b", 2]", 1),
    "a path that leads out": lambda text: text.replace(b'"empty"', b'"../empty"'),
    "a number for a path": lambda text: text.replace(b'"empty"', b"5"),
    "deep": lambda text: b"[" * 60_000,
    "a long line": lambda text: text.replace(b'["empty"', b'["empty", "%s"' % (b"x" * 70_000)),
    "an object": lambda text: text.replace(b'["empty"', b'[{}, "empty"'),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_list_removes_nothing_and_is_written_anew(source, to, damage):
    copy(source, to)
    listed = to / os.fsdecode(LIST)
    listed.write_bytes(DAMAGES[damage](listed.read_bytes()))
    (source / "empty").unlink()
    fill(source, {"new": "new"})
    assert notes(copy(source, to)[0]) == []
    assert (to / "empty").exists()
    (source / "new").unlink()
    assert notes(copy(source, to)[0]) == [REMOVED.format("new")]


def a_link(listed: Path) -> None:
    listed.rename(listed.parents[1] / "elsewhere")
    listed.symlink_to(listed.parents[1] / "elsewhere")


def a_pipe(listed: Path) -> None:
    listed.unlink()
    os.mkfifo(listed)


def another_users(listed: Path) -> None:
    os.chown(listed, 2002, 2002)


@pytest.mark.parametrize("other", [a_link, a_pipe, another_users] if os.geteuid() == 0 else [a_link, a_pipe])
def test_a_list_that_is_no_file_of_ours_counts_as_none(source, to, other):
    copy(source, to)
    (source / "empty").unlink()
    other(to / os.fsdecode(LIST))
    copy(source, to)
    assert (to / "empty").exists()


def test_a_copy_that_was_cut_off_leaves_no_partial_file_knows_what_it_had_begun_and_resumes(source, to):
    """The list is there before the first file. What did not arrive is no change of the host."""
    copy(source, to)
    fill(source, {"train.py": "new text", "late": "late"})
    found, agent = manifest(source), Agent()
    agent.write(message(do="sync", to=str(to)))
    offer(found, range(len(found.entries)), agent.write)
    wanted = agent.last("wanted")["entries"]
    assert [found.entries[index].path for index in wanted] == ["late", "train.py"]
    push(found, wanted[:1], agent.write, lambda count: None)
    agent.write(file(wanted[1], b"new text")[:-3])
    assert temporary(to), "the half one"
    agent.receiver.finish()
    assert not temporary(to)
    assert (to / "late").exists() and (to / "train.py").read_text() == "print(1)\n"
    (source / "late").unlink()
    sync, resumed = copy(source, to)
    assert notes(sync) == [REMOVED.format("late")] and len(resumed.files) == 1
    assert tree(to) == tree(source)


def test_agents_that_share_a_folder_share_its_list(source, to):
    """One copies x while the other, which has read the list before, is about to copy y."""
    copy(source, to)
    slow, fast = Agent("h1"), Agent("h2")
    slow.write(message(do="sync", to=str(to)))
    entries = [row(0, "y"), *rows_of(source)]
    slow.receiver.begin(decode_command(message(do="entries", entries=entries, last=True)))
    slow.receiver.clock = iter(range(10**6)).__next__  # each step ends at once
    assert slow.receiver.step()
    announce(fast, to, [row(0, "x"), *rows_of(source)])
    fast.write(file(0, b"abc"))
    while slow.receiver.step():
        pass
    slow.write(file(0, b"abc"))
    assert fast.last("synced")["files"] == slow.last("synced")["files"] == 1
    assert notes(copy(source, to)[0]) == [REMOVED.format("x, y")]


def test_paths_to_remove_that_nobody_asked_about_are_refused_or_left_alone(source, tmp_path):
    to = fill(tmp_path / "to", {"own": "mine"})
    agent = Agent()
    agent.write(message(do="sync", to=str(to)) + message(do="remove", paths=["own"], last=True))
    assert "paths to remove that it was not asked about" in agent.last("refused")["message"]
    copy(source, to)
    agent = Agent()
    assert announce(agent, to, rows_of(source)[1:]) == {"event": "missing", "paths": ["empty"], "last": True}
    agent.write(message(do="remove", paths=["own", "empty", "train.py"], last=True))
    assert agent.last("synced")["notes"] == [REMOVED.format("empty")]
    assert (to / "own").exists() and (to / "train.py").exists()
    agent.write(message(do="remove", paths=["own"], last=True))
    assert agent.last("refused")["code"] == 125


NAMES = st.binary(min_size=1, max_size=6).filter(
    lambda name: not set(name) & {0, ord("/")} and name not in (b".", b"..", b".git", b".gitignore")
)
TREES = st.recursive(
    st.one_of(st.binary(max_size=40), st.tuples(st.binary(min_size=1, max_size=9).filter(lambda name: 0 not in name))),
    lambda inner: st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=12,
)


def plant(folder: bytes, inside: dict) -> None:
    os.mkdir(folder)
    for name, what in inside.items():
        path = os.path.join(folder, name)
        if isinstance(what, dict):
            plant(path, what)
        elif isinstance(what, tuple):
            os.symlink(what[0], path)
        else:
            with open(path, "wb") as file:
                file.write(what)


@settings(max_examples=examples(30))
@given(st.dictionaries(NAMES, TREES, max_size=5), st.dictionaries(NAMES, TREES, max_size=5))
def test_any_tree_arrives_and_takes_the_place_of_another(tmp_path_factory, first, second):
    folder = tmp_path_factory.mktemp("any")
    plant(os.fsencode(folder / "first"), first)
    plant(os.fsencode(folder / "second"), second)
    copy(folder / "first", folder / "to")
    assert tree(folder / "to") == tree(folder / "first")
    copy(folder / "second", folder / "to")
    assert tree(folder / "to") == tree(folder / "second")


# -- what is ignored -------------------------------------------------------------------------------------------------

PATTERNS = (
    r"a|/a|a/|b/*|!b/a|**/x.o|*.o|!keep|data/**|!data/keep|a/**/b|build/|!build/|# c|\#h|\!b|*|!*/|!a|?|[ab]|[!ab]|"
    r"a b|a\ b|e \ |e |/b/a|**|**/b/**|data/**/|n*|[z-a]|!|/||" + "a\r"
).split("|")


def grow(folder: Path, dice: random.Random, depth: int = 0) -> None:
    for name in dice.sample(["a", "b", "build", "data", "x.o", "keep", "a b", "n\nl.o", "e ", "#h", "!b"], 5):
        if depth < 3 and dice.random() < 0.5:
            (folder / name).mkdir()
            grow(folder / name, dice, depth + 1)
        else:
            (folder / name).write_text("")
    if dice.random() < 0.4:
        (folder / ".gitignore").write_text("\n".join(dice.sample(PATTERNS, 4)))


def by_git(folder: Path, *more: str) -> set[str]:
    command = ["git", "-C", str(folder), "ls-files", "-z", "--others", "--exclude-standard", *more]
    return {os.fsdecode(name) for name in subprocess.run(command, capture_output=True, check=True).stdout.split(b"\0")}


def files(found: Manifest) -> set[str]:
    return {entry.path for entry in found.entries if entry.kind != "folder"}


def test_ignored_is_what_git_ignores(tmp_path):
    """Also from folders inside the repository, to which the files above it still apply."""
    if not shutil.which("git"):
        pytest.skip("git is missing")
    dice, compared = random.Random(7), 0
    for number in range(16):
        top = tmp_path / str(number)
        top.mkdir()
        grow(top, dice)
        subprocess.run(["git", "init", "-q", top], check=True)
        assert files(manifest(top)) == by_git(top) - {""}
        excludes = dice.sample([each for each in PATTERNS if each not in ("", "# c", "!", "/", "[z-a]", "a\r")], 2)
        assert files(manifest(top, excludes)) == by_git(top, *(f"--exclude={exclude}" for exclude in excludes)) - {""}
        for inner in (path for path in top.iterdir() if path.is_dir() and path.name != ".git"):
            if subprocess.run(["git", "-C", top, "check-ignore", "-q", f"./{inner.name}"]).returncode:
                assert files(manifest(inner)) == by_git(inner) - {""}
                compared += 1
    assert compared > 8


def test_a_folder_that_the_repository_ignores_is_copied_when_it_is_the_one(tmp_path):
    fill(tmp_path, {".git/HEAD": "", ".gitignore": "runs/\n", "runs/one/train.py": ""})
    assert files(manifest(tmp_path / "runs" / "one")) == {"train.py"}
    assert files(manifest(tmp_path)) == {".gitignore"}
    fill(tmp_path, {".gitignore": "runs/\n*.txt\n", "runs/one/notes.txt": "", "kept/train.py": "", "kept/a.txt": ""})
    assert files(manifest(tmp_path / "runs" / "one")) == {"train.py", "notes.txt"}, "who works there wants all of it"
    assert files(manifest(tmp_path / "kept")) == {"train.py"}


def test_sync_exclude_wins_over_gitignore(source):
    fill(source, {".gitignore": "*.txt\n", "big.ckpt": ""})
    copied = {".gitignore", "empty", "lib/deep/a.txt", "lib/net.py", "train.py"}
    assert files(manifest(source, ["*.ckpt", "!a.txt"])) == copied
    with pytest.raises(LaunchError, match=r"--sync-exclude !: expected a pattern"):
        manifest(source, ["!"])


# -- what changes meanwhile ------------------------------------------------------------------------------------------


def test_a_log_that_grows_arrives_as_it_was_announced(source, tmp_path):
    announced = manifest(source)
    with open(source / "train.py", "a") as file:
        file.write("print(2)\n")
    sync = Sync(source, lambda cancelled: announced, ["h1"])
    agent = Agent(tell=sync.take)
    assert sync.copy("h1", str(tmp_path / "to"), agent.write)
    assert (tmp_path / "to/train.py").read_text() == "print(1)\n"


class Meddling:
    """Something that does `change` to the source just before files are sent to h1, h2 or h3, `times` times."""

    def __init__(self, sync: Sync, change: Callable[[int], object], times: int = 1):
        self.sync, self.change, self.times = sync, change, times

    def tell(self, event: Event) -> None:
        if isinstance(event, Wanted) and event.entries and self.times > 0:
            self.times -= 1
            self.change(self.times)
        self.sync.take(event)


def rewrite(path: Path, number: int) -> None:
    written = path.parents[1] / f"{path.name}.{number}"
    written.write_text(f"changed {number}")
    written.replace(path)  # at once: nobody sees it empty


def test_no_copy_is_over_before_all_hosts_have_the_same(source, tmp_path):
    """What changes while it goes to the last host goes to the first ones again."""
    sync = Sync(source, partial(manifest, source), ["h1", "h2", "h3"])
    agents = [Agent(host, sync.take) for host in sync.hosts]
    agents[2].tell = Meddling(sync, partial(rewrite, source / "train.py")).tell
    with ThreadPoolExecutor(2) as pool:
        copying = [pool.submit(sync.copy, agent.host, str(tmp_path / agent.host), agent.write) for agent in agents[:2]]
        for agent in agents[:2]:
            wait_for(lambda agent=agent: agent.events and agent.events[-1]["event"] == "synced", "its files")
        assert not any(each.done() for each in copying), "they wait for h3"
        assert sync.copy("h3", str(tmp_path / "h3"), agents[2].write)
        assert all(each.result() for each in copying)
    assert all(tree(tmp_path / host) == tree(source) for host in sync.hosts)
    assert any(event.get("changed") for event in agents[2].events)


def test_a_file_that_vanishes_meanwhile_is_no_failure_and_one_that_keeps_changing_is_named(source, to):
    sync = Sync(source, partial(manifest, source), ["h1"])
    meddling = Meddling(sync, lambda number: (source / "empty").unlink())
    assert sync.copy("h1", str(to), Agent(tell=meddling.tell).write)
    assert tree(to) == tree(source)
    shutil.rmtree(to)
    sync = Sync(source, partial(manifest, source), ["h1"])
    meddling = Meddling(sync, partial(rewrite, source / "train.py"), 99)
    with pytest.raises(LaunchError, match=r"train.py: keeps changing .* --sync-exclude"):
        sync.copy("h1", str(to), Agent(tell=meddling.tell).write)
    assert not (to / "train.py").exists() and (to / "lib/net.py").exists()


def test_what_takes_the_name_of_a_file_meanwhile_is_left_alone(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    (tmp_path / "file").touch()
    before = descriptors()
    for name in ("pipe", "link", "none", "file/none", "."):
        assert opened(os.fsencode(tmp_path / name)) is None
    assert descriptors() <= before


def test_a_file_that_cannot_be_read_is_named(source):
    if os.geteuid() == 0:
        found = manifest(source)
        with pytest.raises(LaunchError, match="cannot read .*: Too many levels|cannot read .*: File name too long"):
            push(Manifest(b"/" + b"x" * 300, found.entries), [1], lambda data: None, lambda count: None)
        return
    (source / "train.py").chmod(0)
    with pytest.raises(LaunchError, match="cannot read .*train.py to copy it: Permission denied; .*--sync-exclude"):
        manifest(source)


def test_the_source_itself_is_found_and_left_alone_and_the_list_of_one_that_is_a_copy_is_not_copied(source, tmp_path):
    (tmp_path / "alias").symlink_to(source)  # as a file system that is shared under another name
    before = tree(source)
    sync, agent = copy(source, tmp_path / "alias")
    assert sync.lines() == ["h1: has the folder itself, nothing to copy"]
    assert [event["event"] for event in agent.events] == ["destination"]
    assert tree(source) == before
    copy(source, tmp_path / "first")
    (tmp_path / "first/lib/deep/a.txt").unlink()
    copy(tmp_path / "first", tmp_path / "second")
    assert tree(tmp_path / "second") == tree(tmp_path / "first")
    assert b"a.txt" not in (tmp_path / "second" / os.fsdecode(LIST)).read_bytes()


def test_a_source_that_its_hosts_can_only_read_is_up_to_date(source, tmp_path, read_only):
    """What matters of a file there is whether it can be executed if it is to be."""
    fill(source, {"tool": "abc"})
    to = read_only(source)
    sync, agent = copy(source, to)
    assert agent.last("synced")["files"] == 0
    (source / "train.py").write_text("changed")
    other = fill(tmp_path / "other", {"train.py": "other"})
    with pytest.raises(LaunchError, match=f"cannot write {to} on h1: Read-only file system"):
        copy(other, to)
    os.chmod(source / "tool", 0o644)
    assert answer(to, [row(0, "tool", 0o600, 5)])["event"] == "synced"
    said = answer(to, [row(0, "tool", 0o755, 5)])
    assert said["event"] == "refused" and "Read-only file system" in said["message"]


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Callable[[Path], Path]]:
    """Another name for a folder, under which it can only be read."""
    mounted = []

    def bind(folder: Path) -> Path:
        to = tmp_path / "read-only"
        to.mkdir()
        for command in (["mount", "--bind", folder, to], ["mount", "-o", "remount,ro,bind", to]):
            if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
                pytest.skip("mounting is not allowed here: needs root")
            mounted[:] = [to]
        return to

    yield bind
    for each in mounted:
        subprocess.run(["umount", each], check=True)


# -- what is cut off -------------------------------------------------------------------------------------------------


def test_what_a_killed_agent_left_is_removed_and_what_another_writes_is_not(source, tmp_path):
    to = fill(tmp_path / "to", {os.fsdecode(PREFIX + b"left"): "half a file"})
    other = Agent()
    announce(other, to, [row(0, "slow")])
    other.write(file(0, b"ab"))
    copy(source, to)
    assert len(temporary(to)) == 1
    other.write(file(0, b"c"))
    assert (to / "slow").read_text() == "abc"
    assert not temporary(to)


def test_a_copy_that_is_ended_early_leaves_no_probe_and_no_descriptor(source, tmp_path):
    before = descriptors()
    entries = [message(do="entries", entries=[row(0, name)], last=True) for name in ("x", "../x")]
    for ends in (b"", *entries, message(do="same")):
        agent = Agent()
        agent.write(message(do="sync", to=str(tmp_path / "to")) + ends)
        if not ends:
            assert os.listdir(tmp_path / "to") == [agent.last("destination")["probe"]]
        agent.receiver.finish()
        assert names(tmp_path / "to") == []
        assert descriptors() <= before
    copy(source, tmp_path / "to")
    copy(source, tmp_path / "to")
    assert descriptors() <= before


LIES = {  # answers to Sync and to the last Entries; what is wrong with them
    "a file that there is not": ([events.Wanted("h1", (9,), 0, True)], "file 9 of 6"),
    "too many files": ([events.Wanted("h1", (0,), 0, False)] * 7, "more files than there are"),
    "a path outside": ([events.Missing("h1", ("train.py", "../secret"), True)], "a path outside"),
    "any path of this machine": ([events.Missing("h1", ("/etc/shadow",), True)], "a path outside"),
    "another answer": ([events.Opened("h1", "/", "")], "sent Opened; expected Missing or Wanted"),
    "a change of nothing": ([events.Wanted("h1", (), 0, True), events.Synced("h1", 0, 0, (6,), ())], "file 6 of 6"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_agent_ends_the_copy(source, lie):
    said, reason = LIES[lie]
    sync = Sync(source, partial(manifest, source), ["h1"])

    def write(data: bytes) -> None:
        answers = [events.Opened("h1", "/to", "")] if b'"sync"' in data else said
        threading.Thread(target=lambda: [sync.take(answer) for answer in answers], daemon=True).start()

    with pytest.raises(LaunchError, match=f"the agent on h1 .*{reason}") as refused:
        sync.copy("h1", "/to", write)
    assert refused.value.code == 125


def test_very_many_entries_and_entries_without_a_destination_are_refused(tmp_path):
    agent = Agent()
    agent.receiver.most = 2
    said = announce(agent, tmp_path, [[number, "folder", f"f{number}", 0, 0, 0, ""] for number in range(3)])
    assert said["event"] == "refused" and "more than 2 files" in said["message"] and "h1" in said["message"]
    agent = Agent()
    agent.write(message(do="entries", entries=[row(0, "x")], last=True))
    said = agent.last("refused")
    assert "before the folder" in said["message"] and "h1" in said["message"] and said["code"] == 125


def test_a_file_that_gives_way_to_another_or_comes_otherwise_is_dropped_and_can_be_announced_anew(tmp_path):
    rows = [row(number, name, mode=0o200) for number, name in enumerate("vwxyz")]
    agent = Agent()
    assert announce(agent, tmp_path, rows) == {"event": "wanted", "entries": [0, 1, 2, 3, 4], "bytes": 15, "last": True}
    agent.write(file(1, b"ab") + file(0, b"ab") + file(0, b"c") + file(2, b"xyz") + file(3, b"a"))
    agent.write(file(3, b"", gone=True))
    assert agent.events[-1]["event"] == "wanted", "one is still to come"
    agent.write(file(4, b"abc"))
    assert agent.last("synced") == {"event": "synced", "files": 2, "bytes": 6, "changed": [1, 2, 3], "notes": []}
    assert names(tmp_path) == ["v", "z"]
    assert stat.S_IMODE(os.stat(tmp_path / "v").st_mode) == 0o600, "its owner can read it"
    agent.write(message(do="entries", entries=[rows[1]], last=True))
    assert agent.last("wanted")["entries"] == [1]
    agent.write(file(1, b"abc"))
    assert agent.last("synced") == {"event": "synced", "files": 1, "bytes": 3, "changed": [], "notes": []}
    assert (tmp_path / "w").read_bytes() == b"abc"


def test_a_folder_that_is_another_disk_gets_its_files_there(small):
    agent = Agent()
    announce(agent, small.parent, [row(0, "small/x")])
    agent.write(file(0, b"a"))
    assert temporary(small)
    agent.write(file(0, b"bc"))
    assert agent.last("synced")["files"] == 1 and os.listdir(small) == ["x"]
    agent.receiver.finish()


def test_a_link_that_cannot_take_its_name_leaves_nothing_and_one_that_leads_elsewhere_is_none_that_was_left(tmp_path):
    (tmp_path / "taken/by").mkdir(parents=True)
    outside = fill(tmp_path / "taken", {"outside": "kept"}) / "outside"
    destination = Destination(os.fsencode(tmp_path), "h1")
    with pytest.raises(OSError):
        destination.link(b"taken", b"target", 0)
    assert os.listdir(tmp_path) == ["taken"]
    (tmp_path / os.fsdecode(PREFIX + b"folder")).mkdir()
    (tmp_path / os.fsdecode(PREFIX + b"link")).symlink_to(outside)
    destination.remove_left()
    destination.close()
    assert len(temporary(tmp_path)) == 2 and outside.read_text() == "kept"


def test_a_name_that_is_no_text_is_shown_in_one_line():
    assert [shown(name) for name in (b"plain", b"two\nlines", b"\xff")] == ["plain", "'two\\nlines'", "\\xff"]


def test_cancelling_and_a_broken_channel_end_the_copy_with_nothing(source, tmp_path):
    def broken(data: bytes) -> None:
        raise BrokenPipeError

    sync = Sync(source, partial(manifest, source), ["h1", "h2"])
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(sync.copy, "h1", str(tmp_path), lambda data: None)
        assert sync.copy("h2", str(tmp_path), broken) is None
        sync.cancel()
        assert waits.result() is None
    with pytest.raises(Over):
        manifest(source, cancelled=lambda: True)


def test_answers_that_nobody_asked_for_are_refused(source):
    sync = Sync(source, partial(manifest, source), ["h1"], patience=0.01)
    answer = events.Wanted("h1", (), 0, True)
    assert sync.take(answer) and sync.take(answer)
    with pytest.raises(ProtocolError, match="more answers"):
        sync.take(answer)
    sync.take(Refused("h1", "it cannot", 2))  # which needs no room


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/etc/x", "../x", "a/../../x", "a//x", "a/./x", "", ".", "a\0b", "\ud800"])
def test_a_path_that_leads_out_is_refused(tmp_path, path):
    said = announce(Agent(), tmp_path / "to", [row(0, path)])
    assert said["event"] == "refused" and said["code"] == 125
    assert "expected a relative path" in said["message"] or path == "\ud800"
    assert os.listdir(tmp_path) == ["to"]


@pytest.mark.parametrize("inside", [False, True])
def test_a_link_on_the_way_is_never_followed(source, tmp_path, inside):
    to, outside = tmp_path / "to", tmp_path / "outside"
    outside.mkdir()
    (to / "real").mkdir(parents=True)
    (to / "lib").symlink_to("real" if inside else outside)
    with pytest.raises(LaunchError, match=r"to/lib is a link on h1"):
        copy(source, to)
    said = announce(Agent(), to, [row(0, "lib/x")])  # without the folder's own row
    assert said["event"] == "refused" and "a folder of its path is a link or a file there" in said["message"]
    agent = Agent()
    announce(agent, to, [[0, "link", "way", 0, 0, 0, str(outside)], row(1, "way/x")])
    agent.write(file(1, b"x"))
    assert agent.last("refused")["code"] == 2
    assert os.listdir(outside) == os.listdir(to / "real") == []


def test_a_folder_and_a_file_of_one_name_are_refused_before_anything_is_written(source, tmp_path):
    to = fill(tmp_path / "to", {"lib": "a file", "train.py/inside": "x"})
    with pytest.raises(LaunchError, match="--sync-exclude"):
        copy(source, to)
    assert sorted(os.listdir(to)) == ["lib", "train.py"]


def test_a_destination_is_in_the_home_folder_or_absolute_and_one_that_cannot_be_made_is_refused(
    source, tmp_path, monkeypatch
):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    sync, _ = copy(source, Path("~/job"))
    assert sync.hosts["h1"].folder == str(tmp_path / "home/job")
    assert tree(tmp_path / "home/job") == tree(source)
    with pytest.raises(LaunchError, match="--sync-dst-dir here on h1: expected an absolute path"):
        copy(source, Path("here"))
    fill(tmp_path, {"file": ""})
    with pytest.raises(LaunchError, match="create the folder .*file/to on h1 .* Not a directory"):
        copy(source, tmp_path / "file" / "to")


def test_nonsense_is_refused_and_what_follows_it_is_passed_over(tmp_path):
    agent = Agent()
    announce(agent, tmp_path, [row(0, "x")])
    agent.write(file(7, b"abc") + file(0, b"abc"))
    assert [event["event"] for event in agent.events] == ["destination", "wanted", "refused"]
    assert agent.last("refused")["code"] == 125
    assert names(tmp_path) == []
    for rows in ([["x"]], [[0, "file", 5, 0, 0, 0, ""]], None):
        with pytest.raises(ProtocolError, match="^entries: entries"):
            announce(Agent(), tmp_path, rows)
    agent = Agent()
    announce(agent, tmp_path, [row(0, "x")])
    agent.write(file(0, b"abcd"))
    assert "more bytes of x than announced" in agent.last("refused")["message"]


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "tmpfs", folder]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a disk of 1 MiB cannot be mounted here: needs root")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_no_room_is_refused_before_anything_is_written(source, small):
    (source / "big").write_bytes(bytes(3 << 19))  # 1.5 MiB, and 4 small files of a page each
    with pytest.raises(LaunchError, match=r"small on h1: 1.5 MiB needed, 1.0 MiB free; ") as said:
        copy(source, small)
    assert said.value.code == 2
    assert os.listdir(small) == []


def test_no_room_for_names_is_refused_before_anything_is_written(tmp_path, small):
    subprocess.run(["mount", "-o", "remount,nr_inodes=5", small], check=True)
    rows = [row(number, f"f{number}", content=b"") for number in range(4)]
    said = answer(small, rows)  # one of the five is the folder's own, and one the list's
    assert said["event"] == "refused" and "5 new files (inodes) needed, 4 free" in said["message"]
    assert answer(small, rows[:3])["event"] == "wanted"


def test_what_is_replaced_gives_room_afterwards_unless_it_has_another_name(source, small):
    def write(byte: bytes, one: int = 300 << 10) -> None:
        (source / "one").write_bytes(byte * one)
        (source / "two").write_bytes(byte * (300 << 10))

    def refused() -> None:
        with pytest.raises(LaunchError, match="0.6 MiB needed, 0.4 MiB free"):
            copy(source, small)
        assert {(small / name).read_bytes() for name in ("one", "two")} == {b"x" * (300 << 10)}

    write(b"w")
    copy(source, small)
    copy(source, small)  # it has all, and needs no room
    write(b"x")
    copy(source, small)  # 0.4 MiB are free: one after the other they fit
    assert (small / "two").read_bytes() == b"x" * (300 << 10)
    write(b"x", 600 << 10)
    refused()
    for name in ("one", "two"):
        os.link(small / name, small / f"kept-{name}")
    write(b"y")
    refused()


def test_a_disk_that_fills_up_meanwhile_is_refused(source, small):
    (source / "big").write_bytes(bytes(600 << 10))
    found, agent = manifest(source), Agent()
    agent.write(message(do="sync", to=str(small)))
    offer(found, range(len(found.entries)), agent.write)
    (small / "filler").write_bytes(bytes(500 << 10))
    push(found, agent.last("wanted")["entries"], agent.write, lambda count: None)
    said = agent.last("refused")
    assert "no space left on h1 while big in" in said["message"] and said["code"] == 2
    assert "big" not in os.listdir(small) and not temporary(small)


# -- the wire --------------------------------------------------------------------------------------------------------


def test_every_write_ends_with_a_message(tmp_path):
    """So other threads' messages may come between any two; large files and small."""
    source, to = tmp_path / "source", tmp_path / "to"
    source.mkdir()
    dice = random.Random(3)
    for number in range(300):
        (source / str(number)).write_bytes(dice.randbytes(dice.choice((0, 1, 100, 5000))))
    (source / "big").write_bytes(dice.randbytes(3 * WRITE_BYTES + 7))
    sync, beats, sizes = Sync(source, partial(manifest, source), ["h1"]), [], []
    agent = Agent(tell=sync.take)
    begin = agent.receiver.begin
    agent.receiver.begin = lambda message: beats.append(1) if isinstance(message, commands.Beat) else begin(message)

    def write(data: bytes) -> None:
        sizes.append(len(data))
        agent.write(data)
        agent.write(message(do="beat"))

    done = sync.copy("h1", str(to), write)
    assert done == f"301 of 301 files, {sync.progress()[0] / 1e6:.1f} MB sent"
    assert tree(to) == tree(source)
    assert len(beats) == len(sizes) and max(sizes) <= WRITE_BYTES
    assert len(sizes) < 20, "small files travel together"


def test_a_step_is_short_and_the_sender_needs_little_memory_however_much_there_is(tmp_path):
    (tmp_path / "big").write_bytes(bytes(16 << 20))
    now, agent = iter(range(10**9)), Agent()
    agent.receiver.clock = lambda: next(now) * 0.01  # each look at the clock finds 10 ms gone
    found, steps, went = manifest(tmp_path), 0, []
    agent.write(message(do="sync", to=str(tmp_path)))
    rows = [[0, "file", "big", 0o644, found.entries[0].mtime, 16 << 20, found.entries[0].sha256]]
    agent.receiver.begin(decode_command(message(do="entries", entries=rows, last=True)))
    while agent.receiver.step():
        steps += 1
    assert steps >= 16 // 6
    assert agent.last("synced")["files"] == 0
    tracemalloc.start()
    try:
        push(found, [0], lambda data: None, went.append)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    assert sum(went) == 16 << 20
