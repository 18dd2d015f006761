"""Caffe's databases: Datums, encoded and raw, in LMDB and LEVELDB, with the keys that Caffe's converters write."""

import json
import os
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from dmltrain.base.errors import UserError
from dmltrain.data.readers import database, datum, open_reader
from dmltrain.data.readers.data_file import Damaged


def varint(value: int) -> bytes:
    value %= 1 << 64
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def raw(planes: np.ndarray, label: int) -> bytes:
    """As CVMatToDatum and SerializeToString write it: (C, H, W), blue first."""
    sizes = b"".join(field(number, size) for number, size in enumerate(planes.shape, 1))
    return sizes + field(4, planes.tobytes()) + field(5, label)


def encoded(image: bytes, label: int) -> bytes:
    return field(4, image) + field(5, label) + field(7, 1)


BGR = np.random.default_rng(3).integers(0, 256, (6, 3, 5, 4), dtype=np.uint8)
KEYS = [b"%08d_n01/image %d.JPEG" % (number, number) for number in range(6)]  # convert_imageset
ROWS = {key: encoded(b"JPEG %d" % n, n) if n % 2 else raw(BGR[n], n) for n, key in enumerate(KEYS)}


def make_lmdb(path: Path, rows: dict[bytes, bytes]) -> Path:
    lmdb = pytest.importorskip("lmdb")
    with lmdb.open(str(path), map_size=1 << 26) as environment, environment.begin(write=True) as transaction:
        for key, value in rows.items():
            transaction.put(key, value)
    return path


def make_leveldb(path: Path, rows: dict[bytes, bytes]) -> Path:
    plyvel = pytest.importorskip("plyvel")
    database = plyvel.DB(str(path), create_if_missing=True)
    with database.write_batch() as batch:
        for key, value in rows.items():
            batch.put(key, value)
    database.compact_range()  # tables, as in a large database, and not only the log
    database.put(KEYS[-1], rows.get(KEYS[-1], b"")) if KEYS[-1] in rows else None
    database.close()
    return path


@pytest.fixture(params=[make_lmdb, make_leveldb], ids=["lmdb", "leveldb"])
def make(request: pytest.FixtureRequest):
    return request.param


def test_encoded_and_raw_datums(make, tmp_path):
    path = make(tmp_path / "train_db", ROWS)
    reader = open_reader(path)
    assert len(reader) == 6 and reader.class_names is None
    for number in range(6):
        record = reader.read(number)
        assert record.labels.dtype == np.float32 and record.labels.tolist() == [number]
        if number % 2:
            assert record.image == b"JPEG %d" % number
        else:
            assert np.array_equal(record.image, BGR[number].transpose(1, 2, 0)[:, :, ::-1])
            assert record.image.dtype == np.uint8 and record.image.flags.c_contiguous
    assert f"{path}: record 4 (key 00000004" in reader.where(4)


@pytest.mark.parametrize(
    "keys",
    [
        [b"%05d" % number for number in range(6)],  # convert_cifar_data
        [b"%08d" % number for number in range(6)],  # convert_mnist_data
        [b"%08d_x" % number for number in (0, 1, 2, 4, 5, 6)],  # an image that convert_imageset could not read
        [b"%08d_x" % number for number in (1, 2, 3, 4, 5, 6)],
        [b"cat", b"dog", b"dog2", b"mouse", b"\xff\xfe", b"\xff\xff"],
        [b"%08d_x" % number for number in (0, 1, 2, 3, 3000, 5)],
    ],
)
def test_any_keys_in_their_order(make, tmp_path, keys):
    rows = dict(zip(keys, ROWS.values(), strict=True))
    path = make(tmp_path / "train_db", rows)
    expected = [int(datum.read(rows[key]).labels[0]) for key in sorted(keys)]
    digests = set()
    for _ in range(2):  # for LEVELDB first without, then with the index that is kept
        reader = open_reader(path)
        assert [int(reader.read(number).labels[0]) for number in range(len(reader))] == expected
        digests.add(reader.digest())
    assert len(digests) == 1


def test_the_digest_is_that_of_the_records_and_several_threads_read_at_once(make, tmp_path):
    digests = [open_reader(make(tmp_path / str(number), ROWS)).digest() for number in range(2)]
    digests.append(open_reader(make(tmp_path / "2", ROWS | {KEYS[0]: encoded(b"other", 0)})).digest())
    assert digests[0] == digests[1] != digests[2]
    path = make(tmp_path / "train_db", ROWS)
    readers = [open_reader(path), open_reader(path)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda number: int(readers[number % 2].read(number % 6).labels[0]), range(600)))
    assert found == [number % 6 for number in range(600)]
    readers.clear()
    assert len(open_reader(path)) == 6


def test_several_processes_at_once_and_a_folder_that_they_cannot_write(make, tmp_path):
    path = make(tmp_path / "train_db", ROWS)
    for file in path.iterdir():
        file.chmod(0o444)
    path.chmod(0o555)
    before = sorted(os.listdir(path))
    reader = open_reader(path)
    program = f"from dmltrain.data.readers import open_reader; print(open_reader({str(path)!r}).read(5).image)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "b'JPEG 5'\n" and done.stderr == ""
    assert reader.read(5).image == b"JPEG 5"
    assert sorted(os.listdir(path)) == before
    path.chmod(0o755)


def test_a_number_without_a_record(tmp_path):
    """Six keys from 0 to 5, of which one is there twice and one is missing: LMDB cannot know it at the start."""
    keys = [b"%08d_a" % number for number in (0, 1, 2, 2, 4, 5)]
    keys[3] += b"b"
    path = make_lmdb(tmp_path / "train_db", dict(zip(keys, ROWS.values(), strict=True)))
    reader = open_reader(path)
    with pytest.raises(UserError, match=r"record 3 \(key 00000003\): there is no key .*00000004_a"):
        reader.read(3)
    with pytest.raises(UserError, match=r"record 3 \(key 00000003\): there is no key"):
        reader.digest()
    reader = database.DatabaseReader(Path("db"), database.NumberedKeys(3, 8), lambda start: None)
    with pytest.raises(UserError, match=r"db: record 2 \(key 00000002\): .* none follows"):
        reader.read(2)


def test_an_empty_database_and_a_datum_that_is_damaged(make, tmp_path):
    with pytest.raises(UserError, match="empty_db: has no records; copy"):
        open_reader(make(tmp_path / "empty_db", {}))
    path = make(tmp_path / "train_db", ROWS | {KEYS[2]: ROWS[KEYS[2]][:-9]})
    with pytest.raises(UserError, match=r"train_db: record 2 \(key 00000002.*damaged; copy"):
        open_reader(path).read(2)


# -- LMDB -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 100, 4096, 8192, 20_000])
def test_a_truncated_lmdb_is_refused_and_kills_nobody(tmp_path, size):
    """LMDB itself would read past the end of its mapping."""
    path = make_lmdb(tmp_path / "train_db", {key: encoded(bytes(20_000), 1) for key in KEYS})
    os.truncate(path / "data.mdb", size)
    with pytest.raises(UserError, match="train_db: .*; copy or make it again"):
        open_reader(path)


def test_a_damaged_page_of_an_lmdb_and_what_is_none(tmp_path):
    path = make_lmdb(tmp_path / "train_db", {b"%08d" % number: encoded(bytes(900), 1) for number in range(200)})
    reader = open_reader(path)
    content = bytearray((path / "data.mdb").read_bytes())
    for page in range(2, len(content) // 4096):  # the flags of all pages but the two at the start
        content[page * 4096 + 10 : page * 4096 + 12] = b"\xff\xff"
    with (path / "data.mdb").open("r+b") as file:
        file.write(content)
    with pytest.raises(UserError, match=r"record 7 \(key 00000007\): .*copy"):
        reader.read(7)
    del reader
    (path / "data.mdb").write_bytes(b"hello" * 10_000)
    with pytest.raises(UserError, match="train_db: .*not an LMDB file"):
        open_reader(path)


# -- LEVELDB ----------------------------------------------------------------------------------------------------------


def kept(path: Path) -> Path:
    return path.with_name(path.name + ".index")


def test_the_index_of_a_leveldb_is_kept_and_made_again_for_another(tmp_path):
    path = make_leveldb(tmp_path / "train_db", ROWS)
    open_reader(path)
    assert kept(path).read_bytes().count(b"\n") == 1  # numbers need no list
    open_reader(path, warn=pytest.fail)
    more = make_leveldb(tmp_path / "more", ROWS | {b"00000006_x": encoded(b"7", 7)})
    kept(path).rename(kept(more))
    made_again(more, 7, f"{kept(more)}: it is the index of another database; it is made again")
    kept(more).write_bytes(b"nothing")
    made_again(more, 7, "it is made again")


def made_again(path: Path, count: int, reason: str, **more) -> None:
    """The index is made again, with one warning for this reason."""
    warnings: list[str] = []
    assert len(open_reader(path, warn=warnings.append, **more)) == count
    assert len(warnings) == 1 and reason in warnings[0]


@pytest.mark.parametrize("keys", [{}, {"numbered": [0, 8]}, {"numbered": [6, 99]}, {"numbered": "6"}])
def test_an_index_without_keys_is_made_again(tmp_path, keys):
    path = make_leveldb(tmp_path / "train_db", ROWS)
    made_again(path, 6, "cannot be written: No such file", index=tmp_path / "missing/index")
    open_reader(path)
    facts = json.loads(kept(path).read_text())
    del facts["numbered"]
    kept(path).write_text(json.dumps(facts | keys) + "\n")
    made_again(path, 6, "it has no keys; it is made again")


def test_a_list_of_keys_that_does_not_fit_is_made_again(tmp_path):
    path = make_leveldb(tmp_path / "train_db", {b"cat": encoded(b"c", 0), b"dog": encoded(b"d", 1)})
    open_reader(path)
    content = kept(path).read_bytes()
    assert content.endswith(np.array([3, 6], np.uint32).tobytes())
    kept(path).write_bytes(content[:-4] + np.array([5], np.uint32).tobytes())
    made_again(path, 2, "it has no keys; it is made again")


def test_a_damaged_leveldb(tmp_path):
    """Each block has a checksum; nothing of a damaged one is read."""
    rows = {key: encoded(os.urandom(5000), 1) for key in KEYS}
    path = make_leveldb(tmp_path / "train_db", rows)
    open_reader(path)
    tables = [file for file in path.iterdir() if file.suffix in (".ldb", ".sst")]
    largest = max(tables, key=lambda file: file.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[12_000] ^= 1
    largest.write_bytes(content)
    reader = open_reader(path)
    with pytest.raises(UserError, match=r"record \d \(key \d+\): (cannot be read: |there is no key)"):
        for number in range(6):
            reader.read(number)
    (path / "CURRENT").write_text("MANIFEST-999999\n")
    with pytest.raises(UserError, match="train_db: .*; copy or make it again"):
        open_reader(path)


def test_only_the_files_of_a_leveldb_are_taken_and_folders_for_its_readers_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "views"))
    (tmp_path / "views").mkdir()
    path = make_leveldb(tmp_path / "train_db", ROWS)
    os.mkfifo(path / "pipe")  # a device would have no end
    os.mkfifo(path / "999999.ldb")
    reader = open_reader(path)
    assert len(reader) == 6 and len(os.listdir(tmp_path / "views")) == 1
    del reader
    assert os.listdir(tmp_path / "views") == []
    (path / "CURRENT").write_text("nothing")
    with pytest.raises(UserError):
        open_reader(path)
    assert os.listdir(tmp_path / "views") == []


# -- missing packages -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("package", "file", "extra"), [("lmdb", "data.mdb", "lmdb"), ("plyvel", "CURRENT", "leveldb")])
def test_a_missing_package_is_named(tmp_path, monkeypatch, package, file, extra):
    monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / file).touch()
    with pytest.raises(UserError, match=rf"needs the package {package}.*pip install 'dmltrain\[{extra}\]'"):
        open_reader(tmp_path)


# -- Datums -----------------------------------------------------------------------------------------------------------


def floats(values: np.ndarray, packed: bool) -> bytes:
    sizes = b"".join(field(number, size) for number, size in enumerate(values.shape, 1))
    data = values.astype("<f4").ravel()
    if packed:
        return sizes + field(6, data.tobytes())
    return sizes + b"".join(varint(6 << 3 | 5) + struct.pack("<f", each) for each in data)


@pytest.mark.parametrize("packed", [True, False])
def test_pixels_as_floats(packed):
    record = datum.read(floats(BGR[0], packed) + field(5, 2))
    assert np.array_equal(record.image, BGR[0].transpose(1, 2, 0)[:, :, ::-1]) and record.labels.tolist() == [2]


@pytest.mark.parametrize("value", [0.5, -1, 256, float("nan")])
def test_floats_that_are_no_pixels(value):
    planes = BGR[0].astype(np.float32)
    planes[1, 2, 3] = value
    with pytest.raises(Damaged, match="float_data are not all whole numbers from 0 to 255"):
        datum.read(floats(planes, True))


def test_planes_labels_and_fields_that_others_do_not_have():
    record = datum.read(raw(BGR[0][:1], 0))  # one plane is grey
    assert np.array_equal(record.image, np.repeat(BGR[0][0][:, :, None], 3, 2))
    assert datum.read(encoded(b"x", -3)).labels.tolist() == [-3]
    assert datum.read(field(4, b"x") + field(7, 1)).labels.tolist() == [0]
    unknown = field(8, 5) + field(9, b"text") + varint(10 << 3 | 1) + bytes(8) + varint(11 << 3 | 5) + bytes(4)
    assert datum.read(unknown + encoded(b"x", 1) + unknown).image == b"x"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (raw(BGR[0], 0)[:-30], r"a field of 60 bytes at its byte \d+ of"),
        (field(4, b"x" * 60), "60 pixels are not 0 planes of 0x0"),
        (raw(BGR[0].reshape(2, 5, 6), 0), "60 pixels are not 2 planes of 5x6"),
        (field(1, 3) + field(2, 1 << 40) + field(3, 1 << 40) + field(4, b"x" * 60), "are not 3 planes of 109"),
        (b"", "0 pixels are not 0 planes"),
        (varint(4 << 3 | 2) + varint(1 << 62) + b"x", f"a field of {1 << 62} bytes at its byte"),
        (varint(1 << 3 | 3), "a field of type 3 at its byte 1"),
        (b"\xff" * 20, "a number at its byte 10 has no end"),
        (b"\x08", "a number at its byte 1 has no end"),
        (field(6, b"12345"), "float_data have 5 bytes"),
    ],
)
def test_a_datum_that_cannot_be_right(content, message):
    with pytest.raises(Damaged, match=message):
        datum.read(content)


ANNOTATED = field(1, encoded(b"x", 3)) + field(2, 0)  # SSD's: a Datum, the kind of boxes, and groups of them
TEXTS = [(b"image-000000001", b"x"), (b"label-000000001", b"lamp"), (b"num-samples", b"1")]
FOREIGN = {
    "SSD": ([(b"%06d_a.jpg" % number, ANNOTATED) for number in range(3)], "AnnotatedDatum"),
    "Caffe2": ([(b"00000000", field(1, b"x") + field(1, b"y"))], "TensorProtos"),
    "text recognition": (TEXTS, "another program's database"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_database_of_another_program_is_named_and_not_damaged(tmp_path, name):
    lmdb = pytest.importorskip("lmdb")
    rows, essential = FOREIGN[name]
    environment = lmdb.open(str(tmp_path / "x_lmdb"), map_size=1 << 20)
    with environment.begin(write=True) as transaction:
        for key, value in rows:
            transaction.put(key, value)
    environment.close()
    with pytest.raises(UserError, match=essential) as error:
        open_reader(tmp_path / "x_lmdb")
    assert "damaged" not in str(error.value) and "x_lmdb: record 0 (key " in str(error.value)
