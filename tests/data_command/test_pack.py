"""dmltrain-data pack: the files that MXNet's im2rec writes, from every source, and after an interruption."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dmltrain.base.errors import UserError
from dmltrain.data.readers import open_reader
from dmltrain.data_command import listing, packing
from dmltrain.data_command.copying import RemoteCopy, copies, copy
from dmltrain.data_command.encode import Encoding
from dmltrain.data_command.pack import old_values
from dmltrain.data_command.partition import owner_of_each, part_sizes
from tests.data.test_readers_caffe import make_lmdb, raw
from tests.data_command.conftest import refused
from tests.launch.sshd import home, sshds  # noqa: F401
from tests.scripts import shell_script

cv2 = pytest.importorskip("cv2", reason="opencv-python-headless is not installed: pip install 'dmltrain[images]'")


def pixels(record) -> np.ndarray:
    return cv2.imdecode(np.frombuffer(record.image, np.uint8), cv2.IMREAD_UNCHANGED)


@pytest.mark.parametrize(("options", "original"), [(("--pass-through",), "sample"), (("--resize", 256), "sample-256")])
def test_the_same_bytes_as_im2rec(run, mxnet_files, ilsvrc12_sample, tmp_path, options, original):
    (tmp_path / "sample.lst").write_bytes((mxnet_files / "sample.lst").read_bytes())
    root = ilsvrc12_sample / "images"
    if not (root / "n01443537").is_dir():  # the list names a folder for each class
        root = tmp_path / "images"
        for path in (ilsvrc12_sample / "images").iterdir():
            (root / path.name.partition("_")[0]).mkdir(parents=True, exist_ok=True)
            (root / path.name.partition("_")[0] / path.name).symlink_to(path)
    done = run("pack", tmp_path / "sample", root, *options, "--num-thread", 2)
    assert done.code == 0, done.err
    for ending in (".idx", ".rec"):
        assert (tmp_path / f"sample{ending}").read_bytes() == (mxnet_files / f"{original}{ending}").read_bytes()
    names = sorted(path.name for path in tmp_path.iterdir() if path.is_file())
    assert names == ["sample.idx", "sample.lst", "sample.rec"]


def test_from_a_folder_in_one_command(run, images, tmp_path):
    done = run("pack", tmp_path / "train", images, "--recursive", "--resize", 20)
    assert done.code == 0 and "15 images of 3 classes" in done.err and "all 15 records are good" in done.err
    reader = open_reader(tmp_path / "train.rec")
    order = [item.number for item in listing.shuffled(listing.find(images, True))]
    assert [reader.number(index) for index in range(15)] == order
    for index, number in enumerate(order):
        record = reader.read(index)
        assert record.labels.tolist() == [number // 5]
        assert pixels(record).shape == ((20, 26, 3) if number % 5 % 2 else (26, 20, 3))


def test_list_only_then_pack_each_part(run, images, tmp_path):
    assert run("pack", "--list", "--recursive", "--train-ratio", 0.8, tmp_path / "x", images).code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x_train.lst", "x_val.lst"]
    assert run("pack", tmp_path / "x", images, "--pass-through").code == 0
    assert (len(open_reader(tmp_path / "x_train.rec")), len(open_reader(tmp_path / "x_val.rec"))) == (12, 3)
    (tmp_path / "y.lst").write_text("0\t1\tbee/bee 1.jpg\n")
    done = run("pack", tmp_path / "y", images, "--recursive", "--pass-through")
    assert f"packs what {tmp_path}/y.lst has" in done.err and "delete the list" in done.err
    assert len(open_reader(tmp_path / "y.rec")) == 1


def test_the_source_is_not_replaced(run, images, tmp_path):
    run("pack", tmp_path / "a", images, "--recursive", "--pass-through")
    before = (tmp_path / "a.rec").read_bytes()
    (tmp_path / "part-1.rec").symlink_to(tmp_path / "a.rec")
    for words in (
        ("pack", tmp_path / "a", tmp_path / "a.rec", "--resize", 20),
        ("partition", tmp_path / "a.rec", "--parts", 2, "--out", tmp_path),
    ):
        refused(run(*words), "this file is read", "another name")
    assert (tmp_path / "a.rec").read_bytes() == before
    assert run("pack", tmp_path / "b", tmp_path / "a.rec", "--no-shuffle", "--pass-through").code == 0
    assert (tmp_path / "b.rec").read_bytes() == before, "another format as its source"


def test_from_a_database_of_pixels(run, tmp_path):
    make_lmdb(tmp_path / "db", {b"%d" % each: raw(np.full((3, 8, 8), 60 * each, np.uint8), each) for each in range(3)})
    done = run("pack", tmp_path / "x", tmp_path / "db", "--no-shuffle")
    assert done.code == 0, done.err
    reader = open_reader(tmp_path / "x.rec")
    for number in range(3):
        record = reader.read(number)
        assert record.labels.tolist() == [number] and abs(int(pixels(record).mean()) - 60 * number) <= 2
    assert "--list needs a folder of images" in run("pack", "--list", tmp_path / "y", tmp_path / "db").err


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        (("--center-crop",), (30, 30, 3)),
        (("--center-crop", "--resize", 10), (10, 10, 3)),
        (("--color", 0, "--center-crop"), (30, 30)),
        (("--encoding", ".png", "--center-crop"), (30, 30, 3)),
        (("--color", -1, "--encoding", ".png", "--quality", 9, "--center-crop", "--inter-method", 2), (30, 30, 3)),
    ],
)
def test_what_is_done_to_an_image(run, images, tmp_path, options, shape):
    assert run("pack", tmp_path / "x", images / "bee", "--no-shuffle", *options).code == 0
    record = open_reader(tmp_path / "x.rec").read(2)
    assert pixels(record).shape == shape and abs(int(pixels(record).mean()) - 80) <= 2
    assert (record.image[:4] == b"\x89PNG") == (".png" in options)


# -- broken images and interruptions ----------------------------------------------------------------------------------


SEVERAL = "9\t2\t0.25\tant/ant 0.jpg\n5\t1\t0.5\tbee/bee 0.jpg\n"


def test_several_labels_are_packed_on_request_and_never_a_class(run, images, tmp_path):
    (tmp_path / "x.lst").write_text(SEVERAL)
    refused(run("pack", tmp_path / "x", images, "--pass-through"), "it has 2 labels", "--pack-label")
    done = run("pack", tmp_path / "x", images, "--pass-through", "--pack-label")
    assert done.code == 0 and "all 2 records are good" in done.err
    done = run("verify", tmp_path / "x.rec")
    assert done.code == 1 and done.out.count("it has 2 labels, expected one (a label width of 1)") == 2
    done = run("verify", tmp_path / "x.lst", "--root", images)
    assert done.code == 1 and done.out.count("it has 2 labels, expected one") == 2


@pytest.mark.parametrize(("numbers", "count"), [((5, 5, 5), 1), ((1, 2, 1, 2), 2), ((1, 2, 3), 0)])
def test_equal_numbers_are_reported(run, images, tmp_path, numbers, count):
    lines = (f"{number}\t0\tant/ant {place}.jpg\n" for place, number in enumerate(numbers))
    (tmp_path / "x.lst").write_text("".join(lines))
    done = run("pack", tmp_path / "x", images, "--pass-through")
    assert done.code == 0
    assert (f"{count} numbers are those of several images, the first of them {numbers[0]}" in done.err) == (count > 0)


MALFORMED = {
    "path before label": ("0\tant/ant 0.jpg\t4\n", "number, label and path"),
    "blanks": ("0 1 ant/ant 0.jpg\n", "the line has no tabs"),
    "a mark": ("\ufeff0\t1\tant/ant 0.jpg\n", "begins with a byte order mark"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_line_is_no_matter_of_the_folder(run, images, tmp_path, name):
    text, essential = MALFORMED[name]
    (tmp_path / "x.lst").write_text(text, encoding="utf-8")
    done = run("verify", tmp_path / "x.lst", "--root", images)
    refused(done, essential, "record 0")
    assert "the folder that the paths" not in done.err


@pytest.fixture
def with_broken(images, tmp_path):
    root = tmp_path / "root"
    (root / "ant").mkdir(parents=True)
    for path in (images / "ant").iterdir():
        (root / "ant" / path.name).symlink_to(path)
    (root / "ant" / "ant 2.jpg").unlink()
    (root / "ant" / "ant 2.jpg").write_bytes(b"no image")
    return root


def test_a_broken_image_ends_it_and_it_goes_on_once_that_is_replaced(run, with_broken, images, tmp_path):
    words = ("pack", tmp_path / "x", with_broken, "--recursive", "--no-shuffle")
    refused(run(*words), "ant 2.jpg", "--skip-broken 1")
    assert not (tmp_path / "x.rec").exists()
    (with_broken / "ant" / "ant 2.jpg").write_bytes((images / "ant" / "ant 2.jpg").read_bytes())
    done = run(*words)
    assert done.code == 0, done.err
    whole = run("pack", tmp_path / "y", images / "ant", "--no-shuffle")
    assert whole.code == 0 and (tmp_path / "x.rec").read_bytes() == (tmp_path / "y.rec").read_bytes()


def test_broken_images_can_be_left_out_but_not_all(run, with_broken, tmp_path):
    words = ("pack", tmp_path / "x", with_broken, "--recursive", "--no-shuffle", "--skip-broken", 1)
    done = run(*words)
    assert done.code == 0 and "left out:" in done.err and "1 broken images left out" in done.err
    reader = open_reader(tmp_path / "x.rec")
    assert [reader.number(index) for index in range(len(reader))] == [0, 1, 3, 4]
    for path in (*(with_broken / "ant").glob("*[01345].jpg"), *tmp_path.glob("x.*")):
        path.unlink()
    refused(run(*words), "x.rec: none of the 1 images")
    assert not (tmp_path / "x.rec").exists()


class Interrupted(Exception):
    pass


def pack_until(reader, last: int, target, count: int) -> None:
    """Pack `count` images with one thread, and interrupt it at the image `last`."""
    read = reader.read

    def interrupted(index: int):
        if index == last:
            raise Interrupted
        return read(index)

    reader.read = interrupted
    with pytest.raises(Interrupted):
        pack(reader, target, count)
    del reader.read


def pack(reader, target, count: int, threads: int = 1) -> list[str]:
    """What packing `count` images says."""
    said: list[str] = []
    packing.pack(packing.Packing(reader, range(count), Encoding()), target, threads, 0, said.append)
    return said


def test_an_interrupted_run_goes_on_where_it_stopped(images, tmp_path):
    (source,) = listing.write(tmp_path / "x", listing.find(images, True), listing.ListDivision())
    reader = open_reader(source, root=images)
    pack_until(reader, 9, tmp_path / "a.rec", 15)
    part = tmp_path / "a.rec.part"
    os.truncate(part, part.stat().st_size - 5)  # the last record is cut off
    assert any("goes on after 8 images" in text for text in pack(reader, tmp_path / "a.rec", 15, threads=2))
    pack(reader, tmp_path / "b.rec", 15)
    for ending in (".rec", ".idx"):
        assert (tmp_path / f"a{ending}").read_bytes() == (tmp_path / f"b{ending}").read_bytes()


def test_images_with_the_same_number_are_all_packed_after_an_interruption(images, tmp_path):
    names = [f"{name}/{name} {number}.jpg" for name in ("ant", "bee") for number in range(5)]
    (tmp_path / "x.lst").write_text("".join(f"{place % 5}\t{place}\t{name}\n" for place, name in enumerate(names)))
    reader = open_reader(tmp_path / "x.lst", root=images)
    pack_until(reader, 7, tmp_path / "a.rec", 10)
    assert any("begins anew: some images have the same" in text for text in pack(reader, tmp_path / "a.rec", 10))
    packed = open_reader(tmp_path / "a.rec")
    assert [packed.read(index).labels[0] for index in range(len(packed))] == list(range(10))


def test_a_disk_that_is_full_is_named_and_the_next_run_goes_on(run, images, tmp_path):
    words = ("pack", tmp_path / "x", images, "--recursive", "--no-shuffle", "--no-verify")
    assert run("pack", "--list", *words[1:]).code == 0
    program = shlex.join([sys.executable, "-m", "dmltrain.data_command.cli", *map(str, words)])
    full = subprocess.run(["bash", "-c", f"ulimit -f 4; {program}"], capture_output=True, text=True)  # KiB
    assert full.returncode == 2 and "x.rec.part: cannot be written: File too large; free some space" in full.stderr
    assert "Traceback" not in full.stderr and "Exception" not in full.stderr
    done = run(*words)
    assert done.code == 0 and "goes on after" in done.err
    assert len(open_reader(tmp_path / "x.rec")) == 15


@pytest.mark.parametrize("number", [-1, 10**18])
def test_a_number_that_no_record_can_have(run, images, tmp_path, number):
    (tmp_path / "x.lst").write_text(f"{number}\t1\tbee/bee 1.jpg\n")
    refused(run("pack", tmp_path / "x", images), f"its number is {number}, expected 0 to 999999999999999999")


def test_other_options_do_not_go_on_with_it(run, with_broken, tmp_path):
    words = ("pack", tmp_path / "x", with_broken, "--recursive", "--no-shuffle")
    run(*words)
    refused(run(*words, "--resize", 20), "begun with other images or options")
    (tmp_path / "x.rec.part").unlink()
    (tmp_path / "x.rec.part.json").unlink()
    assert run(*words, "--resize", 20, "--skip-broken", 1).code == 0


# -- the command line -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (["--list", "True", "x", "r"], ["--list", "x", "r"]),
        (["--list=1", "--recursive=1", "x"], ["--list", "--recursive", "x"]),
        (["--shuffle", "False", "x"], ["--no-shuffle", "x"]),
        (["--pass-through", "0", "x"], ["x"]),
        (["--resize=256", "--list", "x"], ["--resize=256", "--list", "x"]),
    ],
)
def test_values_of_flags_in_old_commands(old, new):
    assert old_values(old) == new


@pytest.mark.parametrize(
    ("words", "essential"),
    [
        ("--quality 0", "--quality 0: expected 1 to 100"),
        ("--quality 95 --encoding .png", "--quality 95: expected 1 to 9"),
        ("--resize -1", "--resize -1"),
        ("--num-thread 0", "--num-thread 0: expected 1 or more"),
        ("--inter-method 7", "--inter-method 7"),
        ("--color 2", "invalid choice"),
        ("--nonsense", "unrecognized arguments: --nonsense"),
        ("--resize 2000000", "--resize 2000000 it would have"),  # it is too large then
    ],
)
def test_mistakes_on_the_command_line(run, images, tmp_path, words, essential):
    refused(run("pack", tmp_path / "x", images / "bee", *words.split()), essential, "bee" if "2000000" in words else "")
    assert not (tmp_path / "x.rec").exists()


def test_mistakes_in_paths(run, images, tmp_path):
    for words in (
        (tmp_path / "no" / "x", images),
        (tmp_path / "x", tmp_path / "none"),
        ("--list", tmp_path / "x", __file__),
    ):
        refused(run("pack", *words))


# dmltrain-data partition: each record in exactly one part, and each part on its worker's host


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


OPEN = {  # what another user can do to a folder of the path -> what is said of it
    "chmod 2770 $1; chgrp 3000 $1": "can be written by the group 3000",
    "chmod 1777 $1": "can be written by every user",
    "chmod 777 $1": "can be written by every user",
    "chown 2002 $1": "belongs to user 2002",
    "mkdir -m 777 $1/up; mkdir -m 755 $1/up/below; rmdir $1.to; ln -s $1/up/below $1.to": "/up can be written by every",
}


@pytest.mark.parametrize("change", OPEN)
def test_a_part_goes_to_no_folder_in_which_others_can_put_something_in_its_place(tmp_path, change):
    if os.geteuid():
        pytest.skip("folders of other users need root")
    folder, source, precious = tmp_path / "a b", tmp_path / "part-0.rec", tmp_path / "precious"
    folder.mkdir(0o755)
    to = tmp_path / "a b.to" if ".to" in change else folder
    to.mkdir(exist_ok=True)
    subprocess.run(["sh", "-ec", change.replace("$1", '"$1"'), "sh", folder], check=True)
    source.write_bytes(b"x" * 1000)
    precious.write_text("precious")
    (to / "train.rec.part").symlink_to(precious)
    ssh = shell_script(tmp_path / "ssh", 'while [ "$1" != -- ]; do shift; done; shift 2; exec /bin/sh -c "$*"')
    one = RemoteCopy(source, "h1", "", 0, str(to / "train.rec"), (str(ssh),))
    with pytest.raises(UserError, match=f"{OPEN[change]}.*chmod go-w"):
        copy(one)
    assert precious.read_text() == "precious" and not (to / "train.rec").exists()


def test_a_part_goes_to_a_folder_that_is_new_or_the_users_alone(tmp_path):
    source, to = tmp_path / "part-0.rec", tmp_path / "new 'one'/below/train.rec"
    source.write_bytes(b"x" * 1000)
    ssh = shell_script(tmp_path / "ssh", 'while [ "$1" != -- ]; do shift; done; shift 2; exec /bin/sh -c "$*"')
    for _ in range(2):
        copy(RemoteCopy(source, "h1", "", 0, str(to), (str(ssh),)))
        assert to.read_bytes() == source.read_bytes() and [path.name for path in to.parent.iterdir()] == [to.name]


@pytest.mark.parametrize("shell", ["exec sh", "exit 0", "echo Welcome; exec sh"])
def test_a_part_is_no_command_for_a_shell_that_a_start_up_file_starts(tmp_path, shell):
    source, seen = tmp_path / "part-0.rec", tmp_path / "seen"
    source.write_text(f"touch {seen}\n")
    ssh = shell_script(tmp_path / "ssh", shell)
    with pytest.raises(UserError, match="ssh h1 echo hello` print hello. if not, a start-up file"):
        copy(RemoteCopy(source, "h1", "", 0, str(tmp_path / "train.rec"), (str(ssh),)))
    assert not seen.exists()


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
def test_mistakes_of_partition(run, packed, tmp_path, monkeypatch, words, essential):
    (tmp_path / "same").write_text("same slots=2\n")
    monkeypatch.chdir(tmp_path)
    done = run("partition", packed, "--out", tmp_path / "parts", *shlex.split(words))
    refused(done, essential)
    assert not (tmp_path / "parts").exists()
