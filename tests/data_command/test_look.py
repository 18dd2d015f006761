"""dmltrain-data verify, index, show and speed; and the program itself; image lists."""

import itertools
import os
import shlex
import subprocess
import sys

import pytest

from dmltrain.base.errors import UserError
from dmltrain.data.readers import open_reader
from dmltrain.data.readers.record_writer import RecordWriter
from dmltrain.data_command import cli, listing, speed, verify
from dmltrain.data_command.cli import VERBS
from dmltrain.data_command.listing import Item, ListDivision
from dmltrain.data_command.progress import ProgressLines, duration
from tests.data_command.conftest import refused

cv2 = pytest.importorskip("cv2", reason="opencv-python-headless is not installed: pip install 'dmltrain[images]'")


def write(path, *rows):
    """A file of records with these labels and images."""
    writer = RecordWriter(path)
    for key, (label, image) in enumerate(rows):
        writer.write(label, key, image)
    writer.finish()


def test_verify_lists_what_cannot_be_used(run, packed, tmp_path):
    data = bytearray(packed.read_bytes())
    offsets = [int(line.split()[1]) for line in packed.with_suffix(".idx").read_text().splitlines()]
    data[offsets[3] + 40 : offsets[3] + 80] = bytes(40)  # in the image of record 3
    (tmp_path / "y.rec").write_bytes(data)
    good = run("verify", packed)
    assert (good.code, good.out) == (0, "") and "all 15 records are good" in good.err
    done = run("verify", tmp_path / "y.rec", "--num-thread", 2)
    (line,) = done.out.splitlines()
    assert done.code == 1 and "y.rec: record 3 (key 3, offset" in line
    assert "15 records, 1 of them cannot be used" in done.err

    class Unreadable:
        def read(self, index):
            raise UserError(f"record {index}: the disk fails")

    assert verify.problem(Unreadable(), None, 5) == "record 5: the disk fails"


def test_verify_reports_one_label_for_all_and_numbers_that_repeat(run, packed, tmp_path):
    image = open_reader(packed).read(0).image
    for labels, expected in (((3.0, 3.0, 3.0), True), ((3.0, 3.0, 4.0), False), ((3.0,), False)):
        write(tmp_path / "x.rec", *((label, image) for label in labels))
        done = run("verify", tmp_path / "x.rec")
        assert done.code == 0 and ("all 3 records have the label 3: " in done.err) == expected
    (tmp_path / "1.jpg").write_bytes(image)
    lines = "".join(f"{number}\t{label}\t1.jpg\n" for label, number in enumerate((7, 8, 7, 9, 9, 9)))
    (tmp_path / "x.lst").write_text(lines)
    done = run("verify", tmp_path / "x.lst")
    assert done.code == 0 and "note: 2 numbers are those of several records, the first of them 7, which 3 " in done.err
    assert "numbers are those" not in run("verify", packed).err


def test_verify_lists_labels_out_of_range_and_those_that_are_no_whole_numbers(run, packed, tmp_path):
    done = run("verify", packed, "--num-classes", 2)
    assert done.code == 1 and len(done.out.splitlines()) == 5
    assert "its label is 2, expected a whole number from 0 to 1" in done.out
    image = open_reader(packed).read(0).image
    write(tmp_path / "x.rec", *((label, image) for label in (float("nan"), float("inf"), 1.5, -1.0, 3.0)))
    done = run("verify", tmp_path / "x.rec")
    wrong = [line.split("its label is ")[1].split(",")[0] for line in done.out.splitlines()]
    assert done.code == 1 and wrong == ["nan", "inf", "1.5", "-1"]


def test_index_stays_if_a_new_one_cannot_be_written_or_the_file_is_damaged_or_is_made_again(run, packed, tmp_path):
    rec, idx = tmp_path / "x.rec", tmp_path / "x.idx"
    rec.write_bytes(b"x" + packed.read_bytes())
    idx.write_text("7\t0\n")
    refused(run("index", rec), "magic number")
    assert idx.read_text() == "7\t0\n"
    rec.write_bytes(packed.read_bytes())
    program = shlex.join([sys.executable, "-m", "dmltrain.data_command.cli", "index", str(rec)])
    done = subprocess.run(["bash", "-c", f"ulimit -f 0; {program}"], capture_output=True, text=True)
    assert done.returncode == 2 and "File too large" in done.stderr and "records" not in done.stderr
    assert idx.read_text() == "7\t0\n"
    done = run("index", rec)
    assert done.code == 0 and "15 records" in done.err
    assert idx.read_bytes() == packed.with_suffix(".idx").read_bytes() and len(list(tmp_path.iterdir())) == 2


def test_show_draws_the_batch(run, packed, tmp_path):
    words = ("--data-train", packed, "--image-shape", "3,24,24", "--batch-size", 5, "--out", tmp_path / "s.png")
    done = run("show", *words)
    assert done.code == 0 and "5 images of 3x24x24" in done.err
    sheet = cv2.imread(str(tmp_path / "s.png"))
    tile = 24 * 4  # enlarged to at least 96 pixels
    assert sheet.shape == (2 * (tile + 18) + 4, 3 * (tile + 4) + 4, 3)
    assert sheet[4:100, 4:100].std() < 5  # each image has one colour
    assert sheet[101:113, 4:100].std() > 5  # its label
    done = run("show", *words, "--batch-size", 128)
    assert done.code == 0 and "15 images of 3x24x24" in done.err, "it draws what there is"


def test_show_as_validation_sees_it_with_names_and_of_broken_images(run, packed, tmp_path):
    (tmp_path / "names").write_text("n1 ant\nn2 bee\nn3 cow\n")
    words = ("--data-train", packed, "--data-val", packed, "--image-shape", "3,30,30", "--evaluation")
    words = (*words, "--class-names", tmp_path / "names", "--out", tmp_path / "s.png")
    assert run("show", *words).code == 0
    assert cv2.imread(str(tmp_path / "s.png")).shape[0] > 400
    write(tmp_path / "x.rec", (0.0, b"no image"))
    words = ("--data-train", tmp_path / "x.rec", "--skip-broken", 1, "--out", tmp_path / "s.png")
    refused(run("show", *words), "all images of the batch are broken")


@pytest.mark.parametrize(
    ("words", "essential"),
    [
        ("show --evaluation", "no validation data"),
        ("show --class-names none.txt", "none.txt: No such file"),
        ("show --out sheet.nonsense", "an ending such as .png"),
        ("show --nonsense 1", "unknown option --nonsense"),
        *(("speed --threads 0", "expected"), ("speed --threads a", "expected"), ("speed --seconds 0", "expected")),
    ],
)
def test_mistakes_of_show_and_speed(run, packed, tmp_path, monkeypatch, words, essential):
    monkeypatch.chdir(tmp_path)
    refused(run(*words.split(), "--data-train", packed, "--image-shape", "3,24,24", "--batch-size", 5), essential)
    assert not list(tmp_path.iterdir())


def test_speed_has_a_row_for_each_number_of_threads(run, packed):
    words = ("--data-train", packed, "--image-shape", "3,24,24", "--batch-size", 4)
    done = run("speed", *words, "--threads", "1,3", "--seconds", 0.05)
    assert done.code == 0
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in done.out.splitlines()[2:]]
    assert [row[0] for row in rows] == ["1", "3"]
    assert all(float(cell) > 0 for row in rows for cell in row[1:])
    done = run("speed", "--dataset", "digits", "--threads", 1, "--seconds", 0.02)  # of images in memory
    assert done.code == 0 and done.out.splitlines()[-1].startswith("| 1 |  | ")


def test_what_is_measured_and_that_progress_is_a_line_every_ten_seconds(capsys):
    """Four yields of 8 images in the two seconds after the first."""
    clock = iter([10.0, 10.5, 11.0, 11.5, 12.0])
    found = speed.measured(itertools.chain([1000], itertools.repeat(8)), 2.0, lambda: next(clock))
    assert found.images == 16.0 and found.of_processor > 0
    now = [0.0]
    lines = ProgressLines("pack x", 1000, 100, sys.stdout, lambda: now[0])
    for seconds, done in ((5.0, 200), (12.0, 340), (15.0, 400)):
        now[0] = seconds
        lines(done)
    lines.end()
    said = capsys.readouterr().out.splitlines()
    assert said == ["pack x: 340 of 1000 images, 20 images/s, 33 s left", "pack x: 400 of 1000 images, 20 images/s"]
    assert [duration(seconds) for seconds in (89, 600, 9000)] == ["89 s", "10 min", "2.5 h"]


def test_the_program(tmp_path):
    def program(*words):
        command = [sys.executable, "-m", "dmltrain.data_command.cli", *words]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)

    shown = program("--help")
    assert shown.returncode == 0 and all(f"\n  {verb} " in shown.stdout for verb in VERBS)
    done = program("verify", "none.rec")
    assert done.returncode == 2 and "error: " in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "essential"),
    [
        *(("", ""), ("nonsense", ""), ("verify", ""), ("verify --nonsense x.rec", "")),
        ("verify x.rec --num-thread 0", "--num-thread 0: expected 1 or more"),
        *(("index x.lst", "x.lst"), ("index none.rec", "none.rec")),
    ],
)
def test_mistakes_in_verbs(run, words, essential):
    refused(run(*words.split()), essential)


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_a_verb_has_examples(verb, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([verb, "--help"])
    assert ended.value.code == 0 and f"dmltrain-data {verb} " in capsys.readouterr().out.partition("examples:")[2]


TEN = [Item(number, f"{number}.jpg", number % 2) for number in range(10)]


def test_each_folder_is_a_class_in_the_order_of_names(images):
    found = listing.find(images, recursive=True)
    assert [item.number for item in found] == list(range(15))
    assert found[0] == Item(0, "ant/ant 0.jpg", 0) and found[-1] == Item(14, "cow/cow 4.jpg", 2)
    assert {item.label for item in listing.find(images / "bee", recursive=False)} == {0}
    with pytest.raises(UserError, match="--recursive"):
        listing.find(images, recursive=False)
    # random.seed(100); random.shuffle(list(range(10))) in Python 3, as im2rec does it
    assert [item.number for item in listing.shuffled(TEN)] == [4, 0, 5, 9, 3, 1, 6, 8, 7, 2]


def test_other_endings(images, tmp_path):
    (tmp_path / "a.PNG").write_bytes(b"")
    (tmp_path / "b.txt").write_bytes(b"")
    assert [item.path for item in listing.find(tmp_path, False)] == ["a.PNG"]
    assert [item.path for item in listing.find(tmp_path, False, [".txt"])] == ["b.txt"]
    (tmp_path / "b").mkdir()
    os.symlink(tmp_path, tmp_path / "b" / "up")  # a link to a folder above ends somewhere
    assert [item.path for item in listing.find(tmp_path, True)] == ["a.PNG"]


@pytest.mark.parametrize(
    ("parts", "sizes"),
    [
        (ListDivision(), {"x.lst": 10}),
        (ListDivision(chunks=3), {"x_0.lst": 4, "x_1.lst": 4, "x_2.lst": 2}),
        (ListDivision(train_ratio=0.8), {"x_val.lst": 2, "x_train.lst": 8}),
        (ListDivision(train_ratio=0.6, test_ratio=0.2), {"x_test.lst": 2, "x_val.lst": 2, "x_train.lst": 6}),
        (ListDivision(train_ratio=0.75, test_ratio=0.25), {"x_test.lst": 2, "x_train.lst": 7}),
    ],
)
def test_parts(tmp_path, parts, sizes):
    written = listing.write(tmp_path / "x", TEN, parts)
    assert {path.name: len(path.read_text().splitlines()) for path in written} == sizes
    every = [line for path in written for line in path.read_text().splitlines()]
    assert len(set(every)) == len(every)
    (path,) = listing.write(tmp_path / "y", [Item(7, "a b/ü.jpg", 3)], ListDivision())
    assert path.read_bytes() == "7\t3.000000\ta b/ü.jpg\n".encode()


@pytest.mark.parametrize(
    ("make", "essential"),
    [
        (lambda: ListDivision(chunks=0), "--chunks 0: expected 1 or more"),
        (lambda: ListDivision(train_ratio=1.5), "--train-ratio 1.5: expected a fraction"),
        (lambda: ListDivision(train_ratio=0.8, test_ratio=0.5), "expected at most 1 together"),
        (lambda: ListDivision(test_ratio=-1), "--test-ratio -1"),
    ],
)
def test_mistakes_of_parts(make, essential):
    with pytest.raises(UserError, match=essential):
        make()


def test_a_tab_in_a_name_and_a_missing_root_are_refused(tmp_path):
    with pytest.raises(UserError, match="tab or line break"):
        listing.write(tmp_path / "x", [Item(0, "a\tb.jpg", 0)], ListDivision())
    assert not list(tmp_path.iterdir())
    with pytest.raises(UserError, match="not a folder"):
        listing.find(tmp_path / "none", True)
