"""Image files in folders of classes, and in lists."""

import os
from pathlib import Path

import numpy as np
import pytest

from dmltrain.base.errors import UserError
from dmltrain.data.readers import compact_names, open_reader
from dmltrain.data.readers.data_file import Damaged


def make(folder: Path, *paths: str) -> Path:
    """Files whose content is their path."""
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(path)
    return folder


def contents(reader) -> list[tuple[int, str]]:
    records = [reader.read(number) for number in range(len(reader))]
    assert all(record.labels.dtype == np.float32 and record.labels.shape == (1,) for record in records)
    return [(int(record.labels[0]), record.image.decode()) for record in records]


# -- folders ----------------------------------------------------------------------------------------------------------


def test_labels_are_the_places_of_the_class_folders_in_order(tmp_path):
    folder = make(tmp_path / "data", "n02/b.JPEG", "n02/a.png", "n01/z.jpg", "n10/1.bmp", "n10/x.webp", "n10/c/d/e.jpg")
    make(tmp_path / "elsewhere", "f.jpg")
    (folder / "n11").symlink_to(tmp_path / "elsewhere")  # links and folders within a class belong to it
    reader = open_reader(folder)
    assert reader.class_names == ("n01", "n02", "n10", "n11")
    assert contents(reader) == [
        *((0, "n01/z.jpg"), (1, "n02/a.png"), (1, "n02/b.JPEG"), (2, "n10/1.bmp"), (2, "n10/c/d/e.jpg")),
        *((2, "n10/x.webp"), (3, "f.jpg")),
    ]
    assert reader.where(2) == f"{folder}: record 2 (n02/b.JPEG)"


def test_names_in_utf_8_and_in_no_encoding_hidden_files_and_others(tmp_path):
    folder = make(tmp_path, "Katze & Hund/Bild äöü 1.jpg", "猫/写真.png")
    Path(os.fsdecode(os.fsencode(folder) + b"/\xff")).mkdir()
    Path(os.fsdecode(os.fsencode(folder) + b"/\xff/\xfe.jpg")).write_text("bytes")
    reader = open_reader(folder)
    assert contents(reader) == [(0, "Katze & Hund/Bild äöü 1.jpg"), (1, "猫/写真.png"), (2, "bytes")]
    assert reader.class_names[1] == "猫"
    assert "record 0 (Katze & Hund/Bild äöü 1.jpg)" in reader.where(0)
    folder = make(tmp_path / "more", "n01/a.jpg", "n01/._a.jpg", "n01/.hidden/b.jpg", ".git/c.jpg", ".d.jpg")
    make(folder, "README", "n01/boxes.txt", "n01/x.xml")
    warnings = []
    assert contents(open_reader(folder, warn=warnings.append)) == [(0, "n01/a.jpg")]
    assert len(warnings) == 1 and "2 files without the name of an image are not read (n01/" in warnings[0]


@pytest.mark.parametrize(
    ("paths", "error"),
    [
        (["n01/a.jpg", "n02/readme.txt", "n03/"], "no image in 2 of 3 class folders: n02, n03; .*remove"),
        (["README"], "has no folders"),
        (["n01/a.jpg", "loose.jpg"], "1 images beside .* loose.jpg; move"),
    ],
)
def test_folders_that_are_no_classes(tmp_path, paths, error):
    for path in paths:
        (tmp_path / path).mkdir(parents=True) if path.endswith("/") else make(tmp_path, path)
    with pytest.raises(UserError, match=f"{tmp_path}: .*{error}"):
        open_reader(tmp_path)


def test_a_link_upwards(tmp_path):
    (make(tmp_path, "n01/a.jpg") / "n01" / "again").symlink_to(tmp_path / "n01")
    with pytest.raises(UserError, match="again lies 8 folders deep.*link upwards"):
        open_reader(tmp_path)


def test_an_image_that_has_gone_or_is_of_any_size(tmp_path):
    reader = open_reader(make(tmp_path, "n01/a.jpg", "n01/b.jpg"))
    (tmp_path / "n01/b.jpg").unlink()
    for read in (lambda: reader.read(1), reader.digest):
        with pytest.raises(UserError, match=r"record 1 \(n01/b.jpg\): cannot be opened: No such file"):
            read()
    os.truncate(tmp_path / "n01/a.jpg", 1 << 40)
    with pytest.raises(UserError, match=f"record 0 .* {1 << 40} bytes, expected .* 536870912"):
        reader.read(0)


def test_the_digest_is_that_of_names_classes_and_sizes_and_not_of_the_place(tmp_path):
    paths = ("n01/a.jpg", "n01/b.jpg", "n02/c.jpg")
    digests = [open_reader(make(tmp_path / str(number), *paths)).digest() for number in range(5)]
    assert len(set(digests)) == 1
    (tmp_path / "0/n01/b.jpg").rename(tmp_path / "0/n01/d.jpg")
    (tmp_path / "1/n01/b.jpg").rename(tmp_path / "1/n02/b.jpg")
    (tmp_path / "2/n02").rename(tmp_path / "2/n03")
    (tmp_path / "3/n02/c.jpg").write_text("longer than it was")
    assert len({open_reader(tmp_path / str(number)).digest() for number in range(5)}) == 5


# -- lists ------------------------------------------------------------------------------------------------------------


def put(folder: Path, text: str | bytes) -> Path:
    path = folder / "train.lst"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_spaces_and_utf_8_in_names(tmp_path):
    make(tmp_path, "Katze & Hund/Bild äöü 1.jpg", "猫/写真.png", "plain.jpg")
    path = put(tmp_path, "0\t3\tKatze & Hund/Bild äöü 1.jpg\n7\t1.000000\t猫/写真.png\n5\t2\tplain.jpg")
    reader = open_reader(path)
    assert contents(reader) == [(3, "Katze & Hund/Bild äöü 1.jpg"), (1, "猫/写真.png"), (2, "plain.jpg")]
    offset = len(path.read_bytes().splitlines()[0]) + 1
    assert reader.where(1) == f"{path}: record 1 (offset {offset}, 猫/写真.png in {tmp_path})"
    assert reader.class_names is None


def test_several_labels_line_ends_of_windows_empty_lines_and_absolute_paths(tmp_path):
    make(tmp_path / "images", "a.jpg", "b.jpg")
    path = put(tmp_path, f"0\t1\t2.5\t-3\ta.jpg\r\n\r\n\n1\t4\tb.jpg\t\r\n\r\n2\t5\t{tmp_path}/images/a.jpg\n")
    reader = open_reader(path, root=tmp_path / "images")
    assert [reader.read(number).labels.tolist() for number in range(len(reader))] == [[1, 2.5, -3], [4], [5]]
    assert [reader.read(number).image for number in (1, 2)] == [b"b.jpg", b"a.jpg"]


def test_another_root_is_refused_at_the_start(tmp_path):
    make(tmp_path / "images", "a.jpg")
    path = put(tmp_path, "0\t1\ta.jpg\n")
    with pytest.raises(UserError, match=f"{path}: record 0.*a.jpg.*No such file.*is {tmp_path} the folder"):
        open_reader(path)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        *((b"", "has no lines"), (b"\n", "has no lines"), (b"\r\n\n", "has no lines")),
        (bytes(100_000), "line 1 has 100000 bytes, .* 65536"),
    ],
)
def test_a_file_that_is_no_list(tmp_path, text, error):
    with pytest.raises(UserError, match=f"train.lst: {error}"):
        open_reader(put(tmp_path, text))


NO_LINES = ["a.jpg", "1 0 a.jpg", "1\ta.jpg", "x\t0\ta.jpg", "1\tnan\ta.jpg", "1\t1e40\ta.jpg", "1\tcat\ta.jpg"]


@pytest.mark.parametrize("line", [*NO_LINES, "1\t\ta.jpg", "1\t0\ta\0.jpg", "\t\t\t\t"])
def test_a_line_that_is_none(tmp_path, line):
    make(tmp_path, "a.jpg")
    with pytest.raises(UserError, match=r"record 1 \(offset 10\): .*number, label and path"):
        open_reader(put(tmp_path, f"0\t0\ta.jpg\n{line}\n"))


def test_the_digest_of_a_list(tmp_path):
    digests = []
    for number, (label, content) in enumerate([("1", "same"), ("1", "same"), ("2", "same"), ("1", "others")]):
        folder = make(tmp_path / str(number), "a.jpg")
        (folder / "a.jpg").write_text(content)
        digests.append(open_reader(put(folder, f"0\t{label}\ta.jpg\n")).digest())
    assert digests[0] == digests[1] and len(set(digests)) == 3


def test_a_list_that_is_cut_or_damaged_while_it_is_read(tmp_path):
    make(tmp_path, "a.jpg")
    path = put(tmp_path, "".join(f"{number}\t0\ta.jpg\n" for number in range(100)))
    reader = open_reader(path)
    assert reader.number(77) == 77
    content = path.read_bytes().replace(b"77\t0", b"77 x ")
    path.write_bytes(content[:-7])
    offset = content.index(b"77 x")
    for call in (reader.read, reader.number):
        with pytest.raises(UserError, match=rf"record 77 \(offset {offset}\): b'77 x .*number, label"):
            call(77)
        with pytest.raises(UserError, match=r"record 99 \(offset \d+\): .* cut it"):
            call(99)


def test_names_have_a_limit():
    assert list(compact_names.collect([b"abc", b"", b"de"], 5)) == [b"abc", b"", b"de"]
    with pytest.raises(Damaged, match="have more than 4 bytes; divide it after 2 records"):
        compact_names.collect([b"abc", b"", b"de"], 4)
