"""CIFAR-10 in all its forms, complete and damaged, and the real files if present. Nothing that a pickle could
execute is loaded."""

import dataclasses
import hashlib
import os
import pickle
import subprocess
import tarfile
from pathlib import Path

import numpy as np
import pytest

from dmltrain.base.errors import UserError
from dmltrain.data import array_pickle, cifar10, source
from tests.archives import little_memory
from tests.data.conftest import tar_gz

BINARY_TAR, PYTHON_TAR = "cifar-10-binary.tar.gz", "cifar-10-python.tar.gz"


def load(folder, cifar, **options):
    return cifar10.load(folder, files=cifar.files, **({"download": False} | options))


def put_archive(cifar, folder, data):
    """Put this binary archive there. Returns the small CIFAR-10 with its md5 as the original's: what is behind it."""
    folder.mkdir(exist_ok=True)
    (folder / BINARY_TAR).write_bytes(data)
    files = dataclasses.replace(cifar.files, md5_binary=hashlib.md5(data).hexdigest())
    return dataclasses.replace(cifar, files=files)


def in_folder(batches):
    """As the members of an archive."""
    return {f"cifar-10-batches-bin/{name}": data for name, data in batches.items()}


def put(cifar, folder, form):
    """The small CIFAR-10 in one of its forms."""
    contents = {
        "binary": ("", cifar.binary),
        "binary folder": ("cifar-10-batches-bin", cifar.binary),
        "python": ("", cifar.python),
        "python folder": ("cifar-10-batches-py", cifar.python),
        "binary archive": ("", {BINARY_TAR: cifar.binary_archive}),
        "python archive": ("", {PYTHON_TAR: cifar.python_archive}),
        "folder of the name": ("cifar10/cifar-10-batches-bin", cifar.binary),
    }
    place, files = contents[form]
    cifar.write(folder / place, files)


FORMS = ["binary", "binary folder", "python", "python folder", "binary archive", "python archive", "folder of the name"]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_arrays(cifar, tmp_path, form):
    put(cifar, tmp_path, form)
    before = sorted(tmp_path.rglob("*"))
    data = load(tmp_path, cifar)
    assert np.array_equal(data.train.images, cifar.images) and data.train.images.shape == (20, 3, 32, 32)
    assert np.array_equal(data.train.labels, cifar.labels)
    assert data.validation.images.shape == (4, 3, 32, 32) and len(data.validation) == 4
    assert data.validation.images[0].tobytes() == cifar.binary["test_batch.bin"][1:3073]
    assert sorted(tmp_path.rglob("*")) == before  # nothing was unpacked
    assert (data.name, data.num_classes, data.image_shape) == ("cifar10", 10, (3, 28, 28))
    used = data.train.augment  # as in MXNet's recipe
    assert (used.pad, used.crop, used.mirror, used.fill) == (4, (28, 28), True, 127)


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 41, 32), (3, 28, 0), (3, 28)])
def test_a_shape_that_is_not_a_crop(cifar, tmp_path, shape):
    put(cifar, tmp_path, "binary")
    whole = load(tmp_path, cifar, image_shape=(3, 32, 32))
    assert whole.image_shape == (3, 32, 32) and whole.train.augment.crop == (32, 32)
    with pytest.raises(UserError, match="--image-shape .*3,32,32 padded by 4.*40,40"):
        load(tmp_path, cifar, image_shape=shape)


@pytest.mark.parametrize("form", ["binary", "python archive"])
@pytest.mark.parametrize("count", [1, 4, 5, 20, 21])
def test_num_examples_takes_the_first_or_all_if_there_are_fewer(cifar, tmp_path, form, count):
    put(cifar, tmp_path, form)
    data = load(tmp_path, cifar, num_examples=count)
    assert np.array_equal(data.train.images, cifar.images[:count])
    assert np.array_equal(data.train.labels, cifar.labels[:count])
    assert len(data.validation) == 4


@pytest.mark.parametrize(
    ("form", "file"), [("binary", "data_batch_3.bin"), ("python", "data_batch_3"), ("binary", "test_batch.bin")]
)
def test_the_error_for_a_changed_byte_has_both_checksums(cifar, tmp_path, form, file):
    put(cifar, tmp_path, form)
    content = (cifar.binary | cifar.python)[file]
    changed = bytearray(content)
    changed[5000] ^= 1
    (tmp_path / file).write_bytes(changed)
    with pytest.raises(UserError) as caught:
        load(tmp_path, cifar)
    for essential in (str(tmp_path / file), *(hashlib.md5(data).hexdigest() for data in (content, changed))):
        assert essential in str(caught.value)


def test_a_wrong_size_is_named_and_a_subset_needs_only_its_batches(cifar, tmp_path):
    put(cifar, tmp_path, "binary")
    (tmp_path / "data_batch_5.bin").unlink()
    for size in (7, 4 * 3073 - 1, 4 * 3073 + 1):
        os.truncate(tmp_path / "data_batch_2.bin", size)
        assert len(load(tmp_path, cifar, num_examples=4).train) == 4
        with pytest.raises(UserError, match=rf"data_batch_2.bin: {size} bytes, expected {4 * 3073}"):
            load(tmp_path, cifar, num_examples=5)


@pytest.mark.parametrize(("form", "suffix"), [("binary", ".bin"), ("python folder", "")])
def test_a_missing_batch_is_named_and_nothing_downloaded(cifar, tmp_path, web, form, suffix):
    put(cifar, tmp_path, form)
    next(tmp_path.rglob("data_batch_4" + suffix)).unlink()
    with pytest.raises(UserError, match=rf"data_batch_4{suffix} missing, while other"):
        load(tmp_path, cifar, download=True, base_url=web.url)
    assert web.requests == []


def test_a_batch_that_is_unreadable_or_of_any_size_is_named(cifar, tmp_path):
    put(cifar, tmp_path, "python")
    path = tmp_path / "data_batch_1"
    os.truncate(path, 1 << 40)
    with pytest.raises(UserError, match=rf"data_batch_1: {1 << 40} bytes, expected at most 24584"):
        load(tmp_path, cifar)
    path.unlink()
    path.symlink_to("/proc/self/mem")  # reading it fails for every user, root too
    with pytest.raises(UserError, match="data_batch_1: cannot be read: Input/output error"):
        load(tmp_path, cifar)
    with pytest.raises(UserError, match="/proc/self/status: 11 bytes, expected 10"):  # which says that it has none
        source.read(Path("/proc/self/status"), 10, "", exact=False)


def test_the_error_for_missing_files_says_which_to_put_where(cifar, tmp_path, web):
    with pytest.raises(UserError) as absent:
        load(tmp_path / "absent", cifar)
    with pytest.raises(UserError) as unreachable:
        load(tmp_path, cifar, download=True, base_url=web.url)
    for error, essentials in (
        (absent, (str(tmp_path / "absent"), BINARY_TAR, PYTHON_TAR, "https://www.cs.toronto.edu/~kriz/")),
        (unreachable, (f"put {BINARY_TAR}", str(tmp_path), cifar.files.md5_binary, "404")),
    ):
        assert [essential for essential in essentials if essential not in str(error.value)] == []
    assert not (tmp_path / "absent").exists()
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="--data-dir .*file: not a folder"):
        load(tmp_path / "file", cifar)


DAMAGES = {
    "cut": lambda whole: whole[: len(whole) // 2],
    "noise": lambda whole: whole[:30000] + b"\0" * 200 + whole[30200:],
    "empty": lambda whole: b"",
    "not gzip": lambda whole: b"<html>not found</html>" * 100,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_archive_is_named_with_its_checksums(cifar, tmp_path, damage):
    data = DAMAGES[damage](cifar.binary_archive)
    (tmp_path / BINARY_TAR).write_bytes(data)
    with pytest.raises(UserError) as caught:
        load(tmp_path, cifar)
    for essential in (tmp_path / BINARY_TAR, hashlib.md5(data).hexdigest(), cifar.files.md5_binary, "download it"):
        assert str(essential) in str(caught.value)
    known = put_archive(cifar, tmp_path, data)  # whatever its checksum
    with pytest.raises(UserError, match=f"{BINARY_TAR}: (cannot be read: .*download it|.*md5)"):
        load(tmp_path, known)


def test_an_archive_of_the_users_own_is_not_opened_and_the_error_says_how_to_use_it(cifar, tmp_path):
    """Its headers alone may take any amount of memory."""
    bomb = tarfile.TarInfo("data_batch_1.bin")
    bomb.pax_headers = {"comment": "x" * (32 << 20)}
    data = tar_gz({"bomb": bomb} | in_folder(cifar.binary))
    (tmp_path / BINARY_TAR).write_bytes(data)
    with little_memory(4 << 20), pytest.raises(UserError) as caught:
        load(tmp_path, cifar)
    for essential in (hashlib.md5(data).hexdigest(), cifar.files.md5_binary, f"unpack it in {tmp_path}"):
        assert essential in str(caught.value)
    subprocess.run(["tar", "xzf", BINARY_TAR], cwd=tmp_path, check=True)
    assert np.array_equal(load(tmp_path, cifar).train.images, cifar.images)


def no_file(kind):
    """Not a regular file, of which a link leads to the right content."""
    found = tarfile.TarInfo(FIRST)
    found.type, found.linkname = kind, str(OUTSIDE)
    return found


FIRST = "cifar-10-batches-bin/data_batch_1.bin"
OUTSIDE = "../outside.bin"
MEMBERS = {  # in the place of the first batch, and the error
    "changed": ({FIRST: bytes(4 * 3073)}, "data_batch_1.bin: md5 .* expected "),
    "large": ({FIRST: bytes(5_000_000)}, "data_batch_1.bin missing"),
    **{
        f"in {place}": ({f"{place}data_batch_1.bin": None}, "data_batch_1.bin missing")
        for place in ("../", "/", "elsewhere/", "cifar-10-batches-bin/../")
    },
    **{
        name: ({"link": no_file(kind)}, "data_batch_1.bin missing")
        for name, kind in (
            *(("symbolic link", tarfile.SYMTYPE), ("link", tarfile.LNKTYPE)),
            *(("pipe", tarfile.FIFOTYPE), ("folder", tarfile.DIRTYPE)),
        )
    },
}


@pytest.mark.parametrize("name", MEMBERS)
def test_only_the_batches_of_an_archive_are_read_and_nothing_is_written(cifar, tmp_path, name):
    members, error = MEMBERS[name]
    batches = in_folder(cifar.binary)
    first = batches.pop(FIRST)
    (tmp_path / "outside.bin").write_bytes(first)
    folder = tmp_path / "data"
    own = {name: first if content is None else content for name, content in members.items()}
    cifar = put_archive(cifar, folder, tar_gz(own | batches))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match=rf"{BINARY_TAR}: {error}"):
        load(folder, cifar)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("known", [False, True], ids=["checksum refuses", "unpickler refuses"])
def test_a_pickle_that_runs_code_is_refused(cifar, tmp_path, evil_pickle, known):
    attack, made = evil_pickle
    put(cifar, tmp_path, "python")
    (tmp_path / "data_batch_1").write_bytes(attack)
    files = cifar.files
    if known:  # even with the right checksum
        first = dataclasses.replace(files.train[0], md5_python=hashlib.md5(attack).hexdigest())
        files = dataclasses.replace(files, train=(first, *files.train[1:]))
    reason = "system, which arrays do not need" if known else "md5 .* expected"
    with pytest.raises(UserError, match=f"data_batch_1: .*{reason}"):
        cifar10.load(tmp_path, files=files, download=False)
    assert not made.exists()


# The real files


def test_the_real_data_and_a_subset_with_its_first_examples(real_data):
    data = cifar10.load(real_data / "cifar10", download=False)
    assert data.train.images.shape == (50000, 3, 32, 32) and data.validation.images.shape == (10000, 3, 32, 32)
    assert np.bincount(data.train.labels).tolist() == [5000] * 10
    assert np.bincount(data.validation.labels).tolist() == [1000] * 10
    assert data.train.labels[:5].tolist() == [6, 9, 9, 4, 1]  # frog, truck, truck, deer, automobile
    np.testing.assert_allclose(data.train.images.mean((0, 2, 3)), cifar10.MEAN, atol=0.02)
    data = cifar10.load(real_data, num_examples=100, download=False)
    row = (real_data / "cifar10" / "data_batch_1.bin").read_bytes()[99 * 3073 : 100 * 3073]
    assert data.train.labels[99] == row[0] and data.train.images[99].tobytes() == row[1:]


def test_arrays_and_plain_values():
    plain, array = {b"labels": [1, 2], b"names": (b"a", "b", None, 1.5)}, np.arange(12, dtype=np.uint8).reshape(3, 4)
    read = array_pickle.loads(pickle.dumps({b"data": array, **plain}, protocol=2))
    assert np.array_equal(read.pop(b"data"), array) and read == plain
    floats = array_pickle.loads(pickle.dumps(np.array([1.5, -2.0], dtype=">f8"), protocol=2))
    assert np.asarray(floats).tolist() == [1.5, -2.0]


@pytest.mark.parametrize(
    "text",
    [
        *(b"cos\nsystem\n(S'false'\ntR.", b"cbuiltins\neval\n(S'1'\ntR.", b"c__builtin__\ngetattr\n."),
        *(b"cnumpy\nload\n.", b"cnumpy.core.multiarray\nfromfile\n.", b"(S'false'\nios\nsystem\n."),
        b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
        b"\x80\x04\x8c\x05numpy\x8c\x0dndarray.dumps\x93.",
        b"\x82\x01.",
    ],
    ids=str,
)
def test_everything_else_is_refused(text):
    with pytest.raises((pickle.UnpicklingError, ValueError)):
        array_pickle.loads(text)


def _array(shape=b"K\x00\x85", kind=b"U\x02u1", content=b"U\x02ab"):
    """A pickle of an array of two bytes, or of what the arguments say."""
    return (
        b"\x80\x02cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n" + shape + b"U\x01b\x87R(K\x01K\x02\x85"
        b"cnumpy\ndtype\n" + kind + b"K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        b"\x89" + content + b"tb."
    )


HUGE = b"J\xff\xff\xff\x3f"  # 2 ** 30 - 1


def test_the_array_of_python_2():
    assert bytes(np.asarray(array_pickle.loads(_array()))) == b"ab"
    empty = b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85U\x01btR."
    with pytest.raises(ValueError, match="without content"):
        np.asarray(array_pickle.loads(empty))


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02Nr\xff\xff\xff\x0f.",  # stores an object under a large number: room for 2 ** 29 objects
        b"\x80\x02Np268435455\n.",
        b"\x80\x02cnumpy\nndarray\n" + HUGE + b"\x85R.",  # numpy.ndarray(2 ** 30 - 1)
        *(b"\x80\x02" + b"]" * 300_000 + b".", _array(kind=b"U\x02O8"), _array(kind=b"U\x09" + b"u1,u1,u1,")),
        *(_array(kind=b"]"), _array(content=b"U\x03abc"), _array(content=b"]")),
        b"\x80\x02c_codecs\nencode\nq\x00X\x64\0\0\0"
        + b"a" * 100
        + b"q\x01U\x06latin1q\x02\x86R"
        + 5 * b"h\x00h\x01h\x02\x86R"
        + b".",
    ],
    ids=["number", "number in text", "ndarray", "steps", "objects", "long type", "type", "size", "list", "texts"],
)
def test_memory_is_limited(data):
    with little_memory(4 << 20), pytest.raises((pickle.UnpicklingError, ValueError, TypeError)):
        array_pickle.loads(data)
