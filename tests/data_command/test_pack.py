"""dmltrain-data pack: the files that MXNet's im2rec writes, from every source, and after an interruption."""

import os
import shlex
import subprocess
import sys

import numpy as np
import pytest

from dmltrain.data.readers import open_reader
from dmltrain.data_command import listing, packing
from dmltrain.data_command.encode import Encoding
from dmltrain.data_command.pack import old_values
from tests.data.test_readers_caffe import make_lmdb, raw
from tests.data_command.conftest import refused

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


def test_all_labels_of_a_list(run, images, tmp_path):
    (tmp_path / "x.lst").write_text("3\t1.0\t0.5\tant/ant 0.jpg\n9\t2.0\t0.25\tbee/bee 1.jpg\n")
    run("pack", tmp_path / "x", images, "--pass-through")
    assert open_reader(tmp_path / "x.rec").read(1).labels.tolist() == [2.0]
    run("pack", tmp_path / "x", images, "--pass-through", "--pack-label")
    reader = open_reader(tmp_path / "x.rec")
    assert reader.read(1).labels.tolist() == [2.0, 0.25] and reader.number(1) == 9


# -- broken images and interruptions ----------------------------------------------------------------------------------


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
    (source,) = listing.write(tmp_path / "x", listing.find(images, True), listing.Parts())
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
