"""MNIST's four files in all their forms, complete and damaged, and the real files if present."""

import dataclasses
import gzip
import hashlib
import subprocess

import numpy as np
import pytest

from dmltrain.base.errors import UserError
from dmltrain.data import mnist
from tests.archives import little_memory

TRAIN_IMAGES = "train-images-idx3-ubyte"


def load(folder, small, **options):
    return mnist.load(folder, files=small.files, **({"download": False} | options))


def write(folder, contents):
    folder.mkdir(exist_ok=True)
    for name, data in contents.items():
        (folder / name).write_bytes(data)


def dotted(contents):
    return {name.replace("-idx", ".idx"): data for name, data in contents.items()}


@pytest.mark.parametrize("form", ["gz", "plain", "dotted", "dotted gz", "folder of the name"])
def test_every_form_gives_the_same_arrays(mnist_files, tmp_path, form):
    contents = {
        **{"gz": mnist_files.zipped, "plain": mnist_files.contents, "dotted": dotted(mnist_files.contents)},
        **{"dotted gz": dotted(mnist_files.zipped), "folder of the name": mnist_files.zipped},
    }[form]
    write(tmp_path / "mnist" if form == "folder of the name" else tmp_path, contents)
    data = load(tmp_path, mnist_files)
    assert data.train.images.shape == (12, 1, 28, 28) and data.validation.images.shape == (5, 1, 28, 28)
    assert data.train.images.tobytes() == mnist_files.contents[TRAIN_IMAGES][16:]
    assert data.validation.labels.tolist() == list(mnist_files.contents["t10k-labels-idx1-ubyte"][8:])
    assert (data.image_shape, data.num_classes, data.train.augment.mirror) == ((1, 28, 28), 10, False)
    first = load(tmp_path, mnist_files, num_examples=3)
    assert first.train.images.tobytes() == mnist_files.contents[TRAIN_IMAGES][16 : 16 + 3 * 784]
    assert len(first.train) == 3 and len(first.validation) == 5
    assert len(load(tmp_path, mnist_files, num_examples=13).train) == 12


def put_archive(small, folder, name, data):
    """Put this .gz file there. Returns the small MNIST with its md5 as the published one: what is behind it."""
    write(folder, {name + ".gz": data})
    changed = {
        field: dataclasses.replace(file, md5_gzip=hashlib.md5(data).hexdigest())
        for field, file in vars(small.files).items()
        if file.name == name
    }
    return dataclasses.replace(small, files=dataclasses.replace(small.files, **changed))


@pytest.mark.parametrize("name", [TRAIN_IMAGES, "t10k-labels-idx1-ubyte"])
def test_the_error_for_a_changed_byte_has_both_checksums(mnist_files, tmp_path, name):
    changed = bytearray(mnist_files.contents[name])
    changed[-1] ^= 1
    write(tmp_path, mnist_files.zipped)
    small = put_archive(mnist_files, tmp_path, name, gzip.compress(changed))
    expected, found = (hashlib.md5(data).hexdigest() for data in (mnist_files.contents[name], changed))
    with pytest.raises(UserError, match=rf"{name}.gz \(unpacked\): md5 {found}, expected {expected}"):
        load(tmp_path, small)


@pytest.mark.parametrize("change", [-1, 1])
def test_a_wrong_size_is_named(mnist_files, tmp_path, change):
    size = len(mnist_files.contents[TRAIN_IMAGES])
    data = (mnist_files.contents[TRAIN_IMAGES] + b"\0")[: size + change]
    write(tmp_path, mnist_files.contents | {TRAIN_IMAGES: data})
    with pytest.raises(UserError, match=f"{TRAIN_IMAGES}: {size + change} bytes, expected {size}"):
        load(tmp_path, mnist_files)
    (tmp_path / TRAIN_IMAGES).unlink()
    small = put_archive(mnist_files, tmp_path, TRAIN_IMAGES, gzip.compress(data))
    with pytest.raises(UserError, match=rf"{TRAIN_IMAGES}.gz \(unpacked\): {size + change} bytes, expected {size}"):
        load(tmp_path, small)


DAMAGES = {"empty": lambda whole: b"", "not gzip": lambda whole: b"<html>not found</html>", "cut": lambda w: w[:-20]}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_gzip_file_is_named(mnist_files, tmp_path, damage):
    name = TRAIN_IMAGES + ".gz"
    data = DAMAGES[damage](mnist_files.zipped[name])
    write(tmp_path, mnist_files.zipped | {name: data})
    with pytest.raises(UserError, match=f"{name}: md5 {hashlib.md5(data).hexdigest()}, expected .*download it"):
        load(tmp_path, mnist_files)
    with pytest.raises(UserError, match=f"{name}.*(damaged gzip|0 bytes, expected)"):
        load(tmp_path, put_archive(mnist_files, tmp_path, TRAIN_IMAGES, data))


def test_a_gzip_file_of_the_users_own_is_not_opened_and_the_error_says_how_to_use_it(mnist_files, tmp_path):
    name = TRAIN_IMAGES + ".gz"
    write(tmp_path, mnist_files.zipped | {name: gzip.compress(mnist_files.contents[TRAIN_IMAGES], 1, mtime=5)})
    with pytest.raises(UserError, match=f"{name}: md5 .* gunzip {tmp_path}"):
        load(tmp_path, mnist_files)
    subprocess.run(["gunzip", tmp_path / name], check=True)
    assert load(tmp_path, mnist_files).train.images.tobytes() == mnist_files.contents[TRAIN_IMAGES][16:]


def test_a_gzip_file_is_not_unpacked_beyond_the_size_of_the_original(mnist_files, tmp_path):
    write(tmp_path, mnist_files.zipped)
    small = put_archive(mnist_files, tmp_path, TRAIN_IMAGES, gzip.compress(bytes(32 << 20), 1))
    with little_memory(4 << 20), pytest.raises(UserError, match="9425 bytes, expected 9424"):
        load(tmp_path, small)


def test_another_idx_file_with_the_same_name(mnist_files, tmp_path):
    labels = mnist_files.contents["train-labels-idx1-ubyte"]
    other = dataclasses.replace(mnist_files.files.train_images, shape=(12,), md5=hashlib.md5(labels).hexdigest())
    wrong = dataclasses.replace(other, shape=(4, 1))  # the same size: 4 + 4 * 2 + 4 * 1 = 4 + 4 + 12 - 4
    data = labels[: wrong.size]
    with pytest.raises(UserError, match=r"magic number 0x0801 .* expected 0x0802 and \[4, 1\]"):
        mnist.parse(wrong, data)
    assert mnist.parse(other, labels).tolist() == list(labels[8:])


def test_missing_files_are_named_or_downloaded_once(mnist_files, tmp_path, web):
    kept = {name: data for name, data in mnist_files.zipped.items() if "t10k-images" not in name}
    write(tmp_path / "some", kept)
    with pytest.raises(UserError, match=f"t10k-images-idx3-ubyte.gz .* not in {tmp_path}/some; put it"):
        load(tmp_path / "some", mnist_files)
    web.files = {"/" + name: data for name, data in mnist_files.zipped.items()}
    write(tmp_path, {TRAIN_IMAGES: mnist_files.contents[TRAIN_IMAGES]})
    for _ in range(2):
        data = load(tmp_path, mnist_files, download=True, base_url=web.url)
        assert data.train.images.tobytes() == mnist_files.contents[TRAIN_IMAGES][16:]
    assert sorted(web.requests) == sorted("/" + name for name in mnist_files.zipped if TRAIN_IMAGES not in name)


def test_the_real_data(real_data):
    data = mnist.load(real_data, download=False)
    assert data.train.images.shape == (60000, 1, 28, 28) and data.validation.images.shape == (10000, 1, 28, 28)
    assert data.train.labels[:5].tolist() == [5, 0, 4, 1, 9]
    assert np.bincount(data.train.labels).tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
