"""dmltrain-data partition: each record in exactly one part, and each part on its worker's host."""

import shlex
from pathlib import Path

import pytest

from dmltrain.data.readers import open_reader
from dmltrain.data_command.copying import copies
from dmltrain.data_command.partition import owner_of_each, part_sizes
from dmltrain.errors import UserError
from tests.data_command.conftest import refused
from tests.launch.sshd import home, sshds  # noqa: F401


def content(path) -> dict[int, tuple[bytes, list[float]]]:
    reader = open_reader(path)
    every = [(reader.number(index), reader.read(index)) for index in range(len(reader))]
    return {number: (record.image, record.labels.tolist()) for number, record in every}


@pytest.mark.parametrize(("more", "sizes"), [((), [5, 5, 5]), (("--weights", "3,1,1"), [9, 3, 3])])
def test_each_record_is_in_exactly_one_part(run, packed, tmp_path, more, sizes):
    done = run("partition", packed, "--parts", 3, "--out", tmp_path / "parts", *more)
    assert done.code == 0, done.err
    parts = [content(tmp_path / "parts" / f"part-{rank}.rec") for rank in range(3)]
    assert [len(part) for part in parts] == sizes
    assert {number: record for part in parts for number, record in part.items()} == content(packed)
    names = [f"part-{rank}.{ending}" for rank in range(3) for ending in ("idx", "rec")]
    assert sorted(path.name for path in (tmp_path / "parts").iterdir()) == names


def test_the_parts_depend_on_the_seed_only():
    assert owner_of_each(100, [1, 1], 3) == owner_of_each(100, [1, 1], 3) != owner_of_each(100, [1, 1], 4)
    many, sizes = owner_of_each(1000, [1.0] * 300, 0), part_sizes(1000, [1.0] * 300)
    assert sorted(many) == [part for part, size in enumerate(sizes) for _ in range(size)]


@pytest.mark.parametrize(
    ("count", "weights", "sizes"), [(10, [1, 1, 1], [4, 3, 3]), (7, [0.5, 0.25, 0.25], [3, 2, 2]), (2, [1, 1], [1, 1])]
)
def test_sizes(count, weights, sizes):
    assert part_sizes(count, weights) == sizes
    with pytest.raises(UserError, match=f"{count} images .* {count + 1} parts"):
        part_sizes(count, [1] * (count + 1))


def test_parts_are_copied_to_their_workers_hosts(run, packed, tmp_path, home, sshds):  # noqa: F811
    servers = [sshds(), sshds()]
    lines = [f"h{number} hostname=127.0.0.1 port={sshd.port} slots=1\n" for number, sshd in enumerate(servers)]
    (tmp_path / "hosts").write_text("".join(lines))
    words = ("partition", packed, "--parts", 2, "--out", tmp_path / "parts", "-H", tmp_path / "hosts")
    target = tmp_path / "on host" / "part-{rank}.rec"
    done = run(*words, "--to", target, "--ssh", f"ssh -F {home.config}")
    assert done.code == 0, done.err
    for rank in range(2):
        for ending in ("rec", "idx"):
            copy = tmp_path / "on host" / f"part-{rank}.{ending}"
            assert copy.read_bytes() == (tmp_path / "parts" / f"part-{rank}.{ending}").read_bytes()
    assert all(sshd.logins for sshd in servers)
    assert not list((tmp_path / "on host").glob("*.part"))


@pytest.mark.parametrize(
    ("placing", "hosts"), [("-s 1", "bab"), ("-s 2", "aba"), ("-s 1 --placement dedicated", "aaa")]
)
def test_a_part_goes_where_the_job_will_have_its_worker(placing, hosts):
    given = ["--hosts", "a:4,b:4", *placing.split()]
    found = copies(given, "/x-{rank}.rec", [Path(f"part-{rank}.rec") for rank in range(3)], ("ssh",))
    assert [copy.hostname for copy in found if copy.path.endswith(".rec")] == list(hosts)
    assert [copy.path for copy in found] == [f"/x-{rank}.{ending}" for rank in range(3) for ending in ("rec", "idx")]


@pytest.mark.thorough
def test_a_copy_goes_on_where_it_ended(run, packed, tmp_path, home, sshds):  # noqa: F811
    sshd = sshds()
    (tmp_path / "hosts").write_text(f"h hostname=127.0.0.1 port={sshd.port}\n")
    words = ("partition", packed, "--parts", 1, "--out", tmp_path / "parts", "-H", tmp_path / "hosts")
    words = (*words, "--to", tmp_path / "copy.rec", "--ssh", f"ssh -F {home.config}")
    part, copy = tmp_path / "copy.rec.part", tmp_path / "copy.rec"
    assert run(*words).code == 0
    original = copy.read_bytes()
    copy.unlink()
    part.write_bytes(original[:1000])  # as an interrupted copy leaves it
    assert run(*words, "--copy-only").code == 0
    assert copy.read_bytes() == original and not part.exists()
    before = copy.stat().st_ino
    assert run(*words, "--copy-only").code == 0  # all is there
    assert copy.stat().st_ino == before
    copy.unlink()
    part.write_bytes(b"x" * 1000)
    wrong = run(*words, "--copy-only")
    assert wrong.code == 2 and "other bytes" in wrong.err and not part.exists()
    sshd.stop()
    again = run(*words, "--copy-only")
    assert again.code == 2 and "127.0.0.1:" in again.err and "--copy-only" in again.err and "refused" in again.err


@pytest.mark.parametrize(
    ("words", "essential"),
    [
        ("--parts 0", "--parts 0: expected 1 or more"),
        ("--parts 2 --weights 1", "--weights 1: expected 2 numbers above 0"),
        ("--parts 2 --weights 1,x", "expected 2 numbers"),
        ("--parts 2 --to /x.rec", "-H and --to"),
        ("--parts 2 -s 2 --to /x.rec", "-H and --to"),
        ("--parts 2 --hosts a,b --placement odd --to /x.rec", "--placement odd: expected one of"),
        ("--parts 2 -H hosts --to x.rec", "absolute path"),
        ("--parts 2 -H same --to /x.rec", "same has several workers: put {rank}"),
        ("--parts 2 -H none.txt --to /x-{rank}.rec", "none.txt"),
        ('--parts 2 --ssh "ssh \'x"', "--ssh ssh 'x: expected a command"),
        ("--parts 2 --ssh ''", "--ssh : expected a command"),
        ("--parts 2 --copy-only", "no such file; leave --copy-only out"),
        ("--parts 16", "15 images cannot be divided into 16 parts"),
    ],
)
def test_mistakes(run, packed, tmp_path, monkeypatch, words, essential):
    (tmp_path / "same").write_text("same slots=2\n")
    monkeypatch.chdir(tmp_path)
    done = run("partition", packed, "--out", tmp_path / "parts", *shlex.split(words))
    refused(done, essential)
    assert not (tmp_path / "parts").exists()
