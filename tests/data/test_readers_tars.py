"""The archives of ILSVRC2012 as they were published, made small: images in a tar of tars; a tar, and the devkit."""

import gzip
import json
import os
import tarfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from dmltrain.base.errors import UserError
from dmltrain.data.readers import mat_file, open_reader
from dmltrain.data.readers.data_file import Damaged
from tests.archives import tar
from tests.data import matlab

CLASSES = {"n02": ["n02_7", "n02_3"], "n01": ["n01_1"], "n10": ["n10_123", "n10_4", "n10_50"]}
WORDS = {"n01": "tench, Tinca tinca", "n02": "goldfish", "n10": "great white shark"}


def image(name: str) -> bytes:
    return f"JPEG of {name} ".encode() * (1 + len(name) % 700)


def signed(block: bytearray) -> bytes:
    """The block with its checksum made right."""
    block[148:156] = b"%06o\0 " % (sum(block[:148]) + sum(block[156:512]) + 8 * 32)
    return bytes(block)


def header(name: str, kind: bytes, size: bytes) -> bytes:
    block = bytearray(tar({name: b""})[:512])
    block[124:136], block[156:157] = size, kind
    return signed(block)


def class_tars(form: int = tarfile.USTAR_FORMAT, classes: Mapping[str, list[str]] = CLASSES) -> dict[str, bytes]:
    inner = {name: {f"{each}.JPEG": image(each) for each in images} for name, images in classes.items()}
    return {f"{name}.tar": tar(files, form) for name, files in inner.items()}


@pytest.fixture
def train(tmp_path: Path) -> Path:
    path = tmp_path / "ILSVRC2012_img_train.tar"
    path.write_bytes(tar(class_tars()))
    return path


def kept(path: Path) -> Path:
    return path.with_name(path.name + ".index")


EXPECTED = [(0, "n01_1"), (1, "n02_7"), (1, "n02_3"), (2, "n10_123"), (2, "n10_4"), (2, "n10_50")]


def check(reader, expected=EXPECTED) -> None:
    assert len(reader) == len(expected)
    for number, (label, name) in enumerate(expected):
        record = reader.read(number)
        assert record.labels.tolist() == [label] and record.image == image(name)
        assert f": record {number} ({name}.JPEG, offset " in reader.where(number)


# -- the training archive ---------------------------------------------------------------------------------------------


def test_labels_are_the_places_of_the_synsets_in_order_and_the_index_is_kept(train):
    reader = open_reader(train)
    check(reader)
    assert reader.class_names == ("n01", "n02", "n10")
    assert sorted(os.listdir(train.parent)) == [train.name, kept(train).name]  # nothing is unpacked
    again = open_reader(train)
    check(again)
    assert again.digest() == reader.digest()


def test_the_kept_index_is_used(train):
    """Headers between those that are compared with the index are not read again."""
    names = {f"n01_{number}.JPEG": image(str(number)) for number in range(200)}
    train.write_bytes(tar({"n01.tar": tar(names)}))
    digest = open_reader(train).digest()
    content = bytearray(train.read_bytes())
    header = content.index(b"n01_100.JPEG")
    content[header : header + 512] = bytes(512)
    train.write_bytes(content)
    assert open_reader(train).digest() == digest
    line, _, columns = kept(train).read_bytes().partition(b"\n")
    place = 8 + 8 * 100  # behind one int64, the end of the class
    kept(train).write_bytes(line + b"\n" + columns[:place] + np.array([1 << 40]).tobytes() + columns[place + 8 :])
    with pytest.raises(UserError, match=rf"record 100 \(number 100, offset {1 << 40}\): .*past the end"):
        open_reader(train).read(100)
    kept(train).unlink()
    assert len(open_reader(train)) == 100  # it looks like the end of the archive


def test_the_index_of_another_archive_is_made_again(train):
    open_reader(train)
    old, size = open_reader(train).digest(), train.stat().st_size
    changed = tar(class_tars(classes={name: images[::-1] for name, images in CLASSES.items()}))
    assert len(changed) == size
    train.write_bytes(changed)
    warnings = []
    reader = open_reader(train, warn=warnings.append)
    assert reader.digest() != old and reader.read(1).image == image("n02_3")
    assert len(warnings) == 1 and f"{kept(train)}: it is the index of another archive" in warnings[0]
    train.write_bytes(tar(class_tars() | {"n11.tar": tar({"n11_1.JPEG": b"image"})}))
    assert len(open_reader(train, warn=warnings.append)) == 7
    assert f"it is the index of an archive of {size} bytes" in warnings[1]


@pytest.mark.parametrize("damage", ["cut", "longer", "text", "other", "facts", "ends", "empty"])
def test_a_damaged_index_is_made_again(train, damage):
    open_reader(train)
    line, _, rest = kept(train).read_bytes().partition(b"\n")
    facts = json.loads(line)
    content = {
        **{"cut": line + b"\n" + rest[:-1], "longer": line + b"\n" + rest + b"\0", "text": b"hello"},
        "other": line.replace(b"dmltrain index", b"another index") + b"\n" + rest,
        "facts": json.dumps({**facts, "classes": [1, 2, 3]}).encode() + b"\n" + rest,
        "ends": line + b"\n" + np.array([1, 0, 6]).tobytes() + rest[24:],
        "empty": b"",
    }[damage]
    kept(train).write_bytes(content)
    warnings = []
    check(open_reader(train, warn=warnings.append))
    assert len(warnings) == 1 and "it is made again" in warnings[0]
    check(open_reader(train, warn=warnings.append))
    assert len(warnings) == 1
    check(open_reader(train, index=train.parent / "missing" / "index", warn=warnings.append))
    assert len(warnings) == 2 and "cannot be written: No such file" in warnings[1]


def test_long_old_and_prefixed_names(tmp_path):
    """In folders; a name in two parts (ustar); and an archive without any magic number (Unix V7)."""
    long, path = "a long name in UTF-8: äöü " * 10, tmp_path / "train.tar"
    for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        inner = {f"{long}_5.JPEG": image("5"), "short_6.JPEG": image("6")}
        path.write_bytes(tar({f"train/{long}/n01.tar": tar(inner, form)}, form))
        reader = open_reader(path)
        assert reader.class_names == ("n01",)
        assert [reader.read(number).image for number in (0, 1)] == [image("5"), image("6")]
    folder = "f" * 90 + "/" + "g" * 60
    path.write_bytes(tar({f"{folder}/n01.tar": tar({f"{folder}/n01_5.JPEG": image("5")})}))
    assert f"({folder}/n01_5.JPEG, " in open_reader(path).where(0)
    block = bytearray(tar({"n02.tar": tar({"n02_5.JPEG": image("5")})}))
    block[257:265] = bytes(8)
    (tmp_path / "old.tar").write_bytes(signed(block))
    assert open_reader(tmp_path / "old.tar").class_names == ("n02",)


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ({"n00.tar": tar({}), "n03.tar": tar({"a.txt": b""})}, "no image in 2 of its 5 archives: n00, n03"),
        ({"again/n01.tar": tar({"n01_1.JPEG": b""})}, "two archives of the class n01"),
        ({"n01_1.JPEG": b""}, "images beside the archives"),
        # its archive has no end mark, though the outer one is whole
        ({"n01.tar": class_tars()["n01.tar"][:1024]}, r"n01.tar in it: the archive ends at offset \d+ without"),
    ],
)
def test_classes_that_cannot_be_right(train, more, error):
    train.write_bytes(tar(class_tars() | more))
    with pytest.raises(UserError, match=f"img_train.tar: .*{error}"):
        open_reader(train)
    assert not kept(train).exists()


@pytest.mark.parametrize("cut", [1, 512, 1024, 9000, 20_000])
def test_a_truncated_archive(train, cut):
    content = train.read_bytes().rstrip(b"\0")
    train.write_bytes(content[: len(content) // 512 * 512 - cut])
    with pytest.raises(UserError, match=r"img_train.tar: .*(truncated; copy or download it again|no tar header)"):
        open_reader(train)


def test_a_damaged_header_and_an_image_that_claims_more_than_the_archive_has(train):
    content = bytearray(train.read_bytes())
    place = content.index(b"n10_4.JPEG")
    content[place] ^= 1
    train.write_bytes(content)
    with pytest.raises(UserError, match=f"n10.tar in it: no tar header at offset {place}"):
        open_reader(train)
    for size in (b"77777777777\0", b"\x80\0\0\0\x7f" + b"\xff" * 7):
        content = bytearray(tar(class_tars()))
        place = content.index(b"n10_4.JPEG")
        content[place + 124 : place + 136] = size
        content[place : place + 512] = signed(content[place : place + 512])
        train.write_bytes(content)
        with pytest.raises(UserError, match=r"n10.tar in it: b'n10_4.JPEG' at offset \d+ has \d+ bytes"):
            open_reader(train)


@pytest.mark.parametrize(
    "records", [b"99 path=a\n", b"x path=a\n", b"0 path=a\n", b"9 pathab\n", b"9" * 5000, b"10 size=x\n"]
)
def test_damaged_pax_records(train, records):
    block = bytearray(tar({"pax": records}))
    block[156:157] = b"x"
    train.write_bytes(tar({"n01.tar": signed(block)}))
    with pytest.raises(UserError, match=r"n01.tar in it: damaged pax records at offset \d+; copy or download it again"):
        open_reader(train)


def test_folders_links_and_global_headers_are_no_files_and_other_files_are_named_once(train):
    others = header("n01/", b"5", b"%011o\0" % 0) + header("n01/a.JPEG", b"2", b"%011o\0" % 0)
    others += header("g", b"g", b"%011o\0" % 17) + b"17 path=b.JPEG\n".ljust(512, b"\0")
    inner, warnings = {"n01_1.JPEG": image("n01_1"), "._n01_1.JPEG": b"", "readme": b"x"}, []
    train.write_bytes(tar({"README": b"hello", "n01.tar": others + tar(inner)}))
    check(open_reader(train, warn=warnings.append), [(0, "n01_1")])
    assert len(warnings) == 1 and "3 files without the name of an image are not read (README ...)" in warnings[0]


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (header("a.JPEG", b"0", b"-7         \0"), "no tar header at offset"),
        (header("a", b"L", b"%011o\0" % (1 << 17)), "a long name of 131072 bytes at offset"),
        (header("a", b"x", b"%011o\0" % 4096), "a long name of 4096 bytes at offset"),
        (header("a.JPEG", b"0", b"%011o\0" % (1 << 29)), "has 536870912 bytes, expected an image of less than"),
    ],
)
def test_a_header_that_cannot_be_right(train, block, message):
    with train.open("wb") as file:  # the last one needs a file of half a gigabyte, most of it a hole
        file.write(header("n01.tar", b"0", b"%011o\0" % ((1 << 29) + 4096 if b"%o" % (1 << 29) in block else 1024)))
        file.write(block + bytes(512))
        file.truncate((1 << 29) + 8192)
    with pytest.raises(UserError, match=f"n01.tar in it: .*{message}"):
        open_reader(train)


def test_an_archive_that_is_empty_or_cut_while_it_is_read(train):
    reader = open_reader(train)
    os.truncate(train, 1000)
    with pytest.raises(UserError, match=r"record 5 \(number 50, offset \d+\): .* has 1000 now"):
        reader.read(5)
    for content, message in ((tar({}), "has no images"), (b"", "the archive ends at offset 0")):
        train.write_bytes(content)
        with pytest.raises(UserError, match=f"train.tar: {message}"):
            open_reader(train)


# -- the validation archive -------------------------------------------------------------------------------------------

# The numbers do not follow the synsets' names; the last two rows are groups of classes.
SYNSETS = [
    {"ILSVRC2012_ID": number, "WNID": wnid, "num_children": children}
    for number, wnid, children in ((1, "n10", 0), (2, "n01", 0), (3, "n02", 0), (4, "n00", 2), (5, "n05", 300))
]
TRUTH = [2, 3, 3, 1]
LABELS = [0, 1, 1, 2]


def meta(packed: bool = True, rows=SYNSETS) -> bytes:
    """With the fields of the real one, in its order."""
    full = [
        {
            **{"ILSVRC2012_ID": row["ILSVRC2012_ID"], "WNID": row["WNID"], "words": WORDS.get(row["WNID"], "group")},
            **{"gloss": "a fish äöü", "num_children": row["num_children"], "children": [2, 3][: row["num_children"]]},
            **{"wordnet_height": 1.0, "num_train_images": 1300},
        }
        for row in rows
    ]
    return matlab.file(matlab.structures("synsets", full), packed=packed)


def devkit_files(**changed: bytes) -> dict[str, bytes]:
    files = {"meta": meta(), "truth": "".join(f"{number}\n" for number in TRUTH).encode()} | changed
    return {
        "ILSVRC2012_devkit_t12/readme.txt": b"hello",
        "ILSVRC2012_devkit_t12/data/meta.mat": files["meta"],
        "ILSVRC2012_devkit_t12/data/ILSVRC2012_validation_ground_truth.txt": files["truth"],
    }


def put_devkit(folder: Path, packed: bool = True, **changed: bytes) -> Path:
    files = devkit_files(**changed)
    if packed:
        path = folder / "ILSVRC2012_devkit_t12.tar.gz"
        path.write_bytes(gzip.compress(tar(files)))
        return path
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder / "ILSVRC2012_devkit_t12"


NAMES = [f"ILSVRC2012_val_{number:08d}" for number in range(1, 5)]


@pytest.fixture
def validation(tmp_path: Path) -> Path:
    path = tmp_path / "ILSVRC2012_img_val.tar"
    path.write_bytes(tar({f"{name}.JPEG": image(name) for name in NAMES}))
    return path


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("beside", [True, False])
def test_labels_come_from_the_devkit_by_meta_mat(validation, packed, beside):
    elsewhere = validation.parent / "elsewhere"
    elsewhere.mkdir()
    devkit = put_devkit(validation.parent if beside else elsewhere, packed)
    for _ in range(2):
        reader = open_reader(validation, devkit=None if beside else devkit)
        check(reader, list(zip(LABELS, NAMES, strict=True)))
        assert reader.class_names == ("n01", "n02", "n10")
    assert kept(validation).exists()


def test_the_digest_has_the_labels_and_the_order_in_the_archive_does_not_matter(validation):
    kits = (put_devkit(validation.parent, truth=truth) for truth in (b"2\n3\n3\n1\n", b"2 3 3 1", b"2\n3\n1\n1\n"))
    digests = [open_reader(validation, devkit=kit).digest() for kit in kits]
    assert digests[0] == digests[1] != digests[2]
    put_devkit(validation.parent)
    validation.write_bytes(tar({f"{name}.JPEG": image(name) for name in NAMES[::-1]}))
    check(open_reader(validation), list(zip(LABELS[::-1], NAMES[::-1], strict=True)))


def test_no_devkit_and_that_of_other_images(validation):
    missing = "ILSVRC2012_devkit_t12.tar.gz: no such file.*labels of ILSVRC2012_img_val.tar.*give its path"
    with pytest.raises(UserError, match=missing):
        open_reader(validation)
    with pytest.raises(UserError, match="/nowhere: no such file"):
        open_reader(validation, devkit="/nowhere")
    put_devkit(validation.parent, truth=b"1\n2\n3\n")
    with pytest.raises(UserError, match="number 1 to 4, .* 1 to 3"):
        open_reader(validation)
    put_devkit(validation.parent)
    validation.write_bytes(tar({"a.JPEG": b"image"}))
    with pytest.raises(UserError, match="number 0 to 0, .*ILSVRC2012_val_00000001.JPEG"):
        open_reader(validation)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"truth": b"2\n3\n4\n1\n"}, "line 3 of .*ground_truth.txt is b'4', expected a class's ILSVRC2012_ID"),
        ({"truth": b"2\ncat\n"}, "line 2 of .*ground_truth.txt is b'cat'"),
        ({"meta": b"hello"}, "meta.mat has no synsets .*: not a MATLAB 5 file"),
        ({"meta": matlab.file(matlab.structures("other", [{"a": 1}]))}, "meta.mat has no synsets"),
        ({"meta": matlab.file(matlab.structures("synsets", [{"a": 1}]))}, "meta.mat has no synsets"),
        ({"meta": meta()[:500]}, "meta.mat has no synsets .*: damaged MATLAB file"),
        ({"meta": meta(rows=SYNSETS + [SYNSETS[0]])}, "meta.mat has 4 classes and 3 numbers for them"),
        ({"meta": meta(rows=SYNSETS[3:])}, "meta.mat has 0 classes"),
    ],
)
def test_a_damaged_devkit(validation, changed, message):
    for packed in (True, False):
        devkit = put_devkit(validation.parent, packed, **changed)
        with pytest.raises(UserError, match=f"{devkit}: {message}.*download ILSVRC2012_devkit_t12.tar.gz"):
            open_reader(validation, devkit=devkit)


def test_a_devkit_that_is_no_archive_or_lacks_files(validation):
    devkit = put_devkit(validation.parent)
    content = devkit.read_bytes()
    for damaged, message in (
        (content[:200], "truncated; copy or download it again"),
        (b"hello", "not an archive that gzip packed"),
        (gzip.compress(tar({"a": b""})), "ILSVRC2012_validation_ground_truth.txt, meta.mat missing in it"),
        (gzip.compress(bytes(40 << 20)), "ground_truth.txt, meta.mat missing in it"),
    ):
        devkit.write_bytes(damaged)
        with pytest.raises(UserError, match=f"{devkit}: .*({message})"):
            open_reader(validation)
    folder = put_devkit(validation.parent, packed=False)
    for given, file, name in ((None, devkit, ""), (folder, folder / "data/meta.mat", "data/meta.mat ")):
        os.truncate(file, 1 << 40)
        with pytest.raises(UserError, match=f"{name}has {1 << 40} bytes"):
            open_reader(validation, devkit=given)
    (folder / "data/meta.mat").unlink()
    with pytest.raises(UserError, match="cannot be opened: No such file"):
        open_reader(validation, devkit=folder)


# -- MATLAB files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [True, False])
def test_a_matlab_file_of_structures(packed):
    rows = mat_file.read(meta(packed))["synsets"]
    assert [row["WNID"] for row in rows] == ["n10", "n01", "n02", "n00", "n05"]
    assert [row["ILSVRC2012_ID"].tolist() for row in rows] == [[1], [2], [3], [4], [5]]
    assert rows[0]["gloss"] == "a fish äöü" and rows[0]["words"] == WORDS["n10"]
    assert rows[3]["children"].tolist() == [2, 3] and not rows[0]["children"].size
    assert rows[0]["wordnet_height"].tolist() == [1.0]


def test_cells_several_variables_and_an_empty_field():
    cell = matlab.matrix("cell", 1, (1, 2), matlab.value("text"), matlab.value(7))
    found = mat_file.read(matlab.file(cell, matlab.structures("s", [{"a": 1}]), packed=False))
    assert found["cell"][0] == "text" and found["cell"][1].tolist() == [7] and len(found["s"]) == 1
    # MATLAB writes a field that was never set as a matrix of no bytes
    names = matlab.element(1, b"a".ljust(32, b"\0"))
    empty = matlab.matrix("s", 2, (1, 1), matlab.element(5, b"\x20\0\0\0"), names, matlab.element(14, b""))
    assert mat_file.read(matlab.file(empty)) == {"s": [{"a": []}]}
    nested = matlab.value(1)
    for _ in range(20):
        nested = matlab.matrix("", 1, (1, 1), nested)
    with pytest.raises(Damaged, match="without end"):
        mat_file.read(matlab.file(nested))


A_NAME = matlab.element(1, b"a" * 32)


@pytest.mark.parametrize(
    "variable",
    [
        matlab.matrix("m", 2, (1 << 15, 1 << 15), matlab.element(5, b"\x20\0\0\0"), A_NAME),
        matlab.matrix("m", 2, (1, 1), matlab.element(5, b"\0\0\0\0"), A_NAME),
        matlab.matrix("m", 2, (1, 1), matlab.element(5, b"\x20\0\0\0"), A_NAME, matlab.element(5, b"")),
        matlab.matrix("m", 3, (1, 1), matlab.element(5, b"")),
        matlab.matrix("m", 6, (1, 1), matlab.element(99, b"abcd")),
        matlab.matrix("m", 6, (1, 1)),
        b"\x0e\0\0\0\xff\xff\xff\xff",
    ],
)
def test_a_matlab_file_that_cannot_be_right(variable):
    with pytest.raises(Damaged, match="damaged MATLAB file"):
        mat_file.read(matlab.file(variable))
