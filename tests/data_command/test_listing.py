"""Image lists: the files that im2rec writes."""

import os

import pytest

from dmltrain.data_command import listing
from dmltrain.data_command.listing import Item, Parts
from dmltrain.errors import UserError

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
        (Parts(), {"x.lst": 10}),
        (Parts(chunks=3), {"x_0.lst": 4, "x_1.lst": 4, "x_2.lst": 2}),
        (Parts(train_ratio=0.8), {"x_val.lst": 2, "x_train.lst": 8}),
        (Parts(train_ratio=0.6, test_ratio=0.2), {"x_test.lst": 2, "x_val.lst": 2, "x_train.lst": 6}),
        (Parts(train_ratio=0.75, test_ratio=0.25), {"x_test.lst": 2, "x_train.lst": 7}),
    ],
)
def test_parts(tmp_path, parts, sizes):
    written = listing.write(tmp_path / "x", TEN, parts)
    assert {path.name: len(path.read_text().splitlines()) for path in written} == sizes
    every = [line for path in written for line in path.read_text().splitlines()]
    assert len(set(every)) == len(every)
    (path,) = listing.write(tmp_path / "y", [Item(7, "a b/ü.jpg", 3)], Parts())
    assert path.read_bytes() == "7\t3.000000\ta b/ü.jpg\n".encode()


@pytest.mark.parametrize(
    ("make", "essential"),
    [
        (lambda: Parts(chunks=0), "--chunks 0: expected 1 or more"),
        (lambda: Parts(train_ratio=1.5), "--train-ratio 1.5: expected a fraction"),
        (lambda: Parts(train_ratio=0.8, test_ratio=0.5), "expected at most 1 together"),
        (lambda: Parts(test_ratio=-1), "--test-ratio -1"),
    ],
)
def test_mistakes(make, essential):
    with pytest.raises(UserError, match=essential):
        make()


def test_a_tab_in_a_name_and_a_missing_root_are_refused(tmp_path):
    with pytest.raises(UserError, match="tab or line break"):
        listing.write(tmp_path / "x", [Item(0, "a\tb.jpg", 0)], Parts())
    assert not list(tmp_path.iterdir())
    with pytest.raises(UserError, match="not a folder"):
        listing.find(tmp_path / "none", True)
