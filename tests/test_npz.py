"""An archive of arrays takes no more memory than its file, and is numpy's npz."""

import hashlib
import io
import math
import random
import struct
import zipfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmltrain.base import bounded, npz
from dmltrain.base.errors import UserError
from dmltrain.checkpoints import seal
from dmltrain.kvstore import state_file
from tests.archives import refused

ARRAYS = {
    "a/b": np.arange(6, dtype=np.float32).reshape(2, 3),
    "columns": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "scalar": np.array(5, np.int64),
    "empty": np.zeros((0, 4), np.uint8),
    "large end": np.array([1, 2], ">i4"),
}


def saved(save=np.savez, **arrays):
    stream = io.BytesIO()
    save(stream, **arrays)
    return stream.getvalue()


def archive(members, **options):
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", **options) as made:
        for name, data in members.items():
            made.writestr(name, data)
    return stream.getvalue()


def npy(header, data=b"", version=b"\1\0"):
    """A .npy file; `header`: the text of its dictionary."""
    text = header.encode() + b"\n"
    return b"\x93NUMPY" + version + struct.pack("<H" if version == b"\1\0" else "<I", len(text)) + text + data


def of(dtype, shape, data=b"", **options):
    """An npz with one array."""
    header = f"{{'descr': {dtype!r}, 'fortran_order': False, 'shape': {shape!r}}}"
    return archive({"a.npy": npy(header, data, **options)})


@pytest.mark.parametrize("sealing", [bytes, seal.sealed])
def test_numpys_files_are_read(sealing):
    found = npz.read(sealing(saved(**ARRAYS)))
    assert list(found) == list(ARRAYS)
    for name, array in ARRAYS.items():
        assert np.array_equal(found[name], array) and found[name].dtype == array.dtype
        assert found[name].flags.writeable and found[name].flags.f_contiguous == array.flags.f_contiguous
    assert npz.read(sealing(saved())) == {}
    assert npz.read(of("<u2", (2,), b"abcd", version=b"\2\0"))["a"].tolist() == [0x6261, 0x6463]


def directory(content, size=None, offset=None):
    """Change the size or offset of the table of contents in the record at the end."""
    found = struct.unpack("<II", content[-10:-2])
    new = (found[0] if size is None else size, found[1] if offset is None else offset)
    return content[:-10] + struct.pack("<II", *new) + content[-2:]


ONE = saved(a=np.arange(5.0))
LARGE_PLACE = struct.pack("<QQ", *struct.unpack("<II", ONE[-10:-2]))
LARGE_END = ONE[:-22] + struct.pack("<4s8x", b"PK\6\6") + bytes(28) + LARGE_PLACE
LARGE_LOCATOR = struct.pack("<4s4xQ4x", b"PK\6\7", len(ONE) - 22)
BAD = {
    "compressed": (saved(np.savez_compressed, a=np.zeros(1 << 20)), "'a.npy' in it is compressed"),
    "claims a size": (archive({"a.npy": b"x"}).replace(b"\1\0\0\0\1\0\0\0", b"\1\0\0\0\xff\xff\xff\x7f"), "compressed"),
    "not an archive": (b"x" * 1000, "the end of the archive is missing"),
    "empty": (b"", "the end of the archive is missing"),
    "short": (b"PK\5\6", "the end of the archive is missing"),
    "in front": (b"x" * 10 + ONE, "table of contents is not at its end"),
    "behind": (ONE + b"x", "table of contents is not at its end"),
    "table elsewhere": (directory(ONE, offset=0), "table of contents is not at its end"),
    "large table": (directory(ONE, size=1 << 30), "table of contents has 1073741824 bytes, the limit is 67108864"),
    "wrong large end": (ONE[:-22] + LARGE_LOCATOR + ONE[-22:], "the end of the archive is altered"),
    "table is noise": (ONE[: -22 - 51] + b"x" * 51 + ONE[-22:], "its table of contents is unreadable"),
    "long shape": (of("<f8", (1 << 40,)), "0 bytes of float64 for .* expected 8796093022208 bytes"),
    "short shape": (of("<f8", (1,), b"x" * 16), "16 bytes of float64 for .* expected 8 bytes"),
    "negative shape": (of("<f8", (-1, -2), b"x" * 16), "16 bytes of float64 for"),
    "objects": (of("|O", (1,), b"x" * 8), "8 bytes of object .* numbers"),
    "text": (of("<U2", (1,), b"x" * 8), "8 bytes of <U2 .* numbers"),
    "endless header": (archive({"a.npy": npy("(" * 9000)}), "not an archive of arrays"),
    "long header": (archive({"a.npy": npy(" " * 20_000)}), "not an archive of arrays: Header info length"),
    "version 3": (of("<f8", (0,), version=b"\3\0"), r"version \(3, 0\)"),
    "no header": (archive({"a.npy": b"x"}), "not an archive of arrays"),
    "damaged member": (ONE.replace(np.arange(5.0).tobytes(), bytes(40)), "Bad CRC"),
}


@pytest.mark.parametrize("case", BAD)
def test_everything_else_is_refused_before_it_takes_memory(case):
    refused(npz.read, *BAD[case], memory=4 << 20)


DTYPES = st.sampled_from(["<f4", ">f8", "|u1", "<i8", "|b1", "|O", "<U3", "<c8", "<M8[s]", "V4", "", "x"])
SHAPES = st.lists(st.integers(-1, 5) | st.just(1 << 40), max_size=3).map(tuple)


@given(
    st.dictionaries(
        st.sampled_from(["a", "b.npy", "c/d", ""]),
        st.tuples(DTYPES, SHAPES, st.booleans(), st.binary(max_size=50) | st.none()),
        max_size=3,
    )
)
def test_any_arrays_are_those_that_numpy_reads_or_refused(arrays):
    members = {}
    for name, (dtype, shape, by_columns, data) in arrays.items():
        header = f"{{'descr': {dtype!r}, 'fortran_order': {by_columns}, 'shape': {shape!r}}}"
        try:
            fitting = bytes(range(1, 200))[: math.prod(shape) * np.dtype(dtype).itemsize]
        except TypeError:
            fitting = b""
        members[f"{name}.npy"] = npy(header, fitting if data is None else data)
    content = archive(members)
    try:
        found = npz.read(content)
    except ValueError:
        return
    with np.load(io.BytesIO(content), allow_pickle=False) as expected:
        assert list(found) == expected.files
        for name in expected.files:
            assert found[name].dtype == expected[name].dtype and found[name].shape == expected[name].shape
            assert found[name].tobytes() == expected[name].tobytes()


def test_members_that_share_their_bytes_count_twice():
    """Fifield's bomb: a table of contents with one member's place many times."""
    one = archive({"a.npy": bytes(1000)})
    size, offset = struct.unpack("<II", one[-10:-2])
    entry = one[offset : offset + size]
    many = one[:offset] + entry * 5 + one[-22:]
    with pytest.raises(ValueError, match="its members have 5000 bytes, more than its own"):
        npz.check(directory(many, size=5 * size))


def test_an_end_with_large_numbers_is_read():
    content = LARGE_END + LARGE_LOCATOR + ONE[-22:]
    assert npz.read(content)["a"].tolist() == [0, 1, 2, 3, 4]
    assert zipfile.ZipFile(io.BytesIO(content)).namelist() == ["a.npy"]


def test_the_state_of_another_program_is_named(tmp_path):
    path = tmp_path / "states"
    path.write_bytes(BAD["compressed"][0])
    with pytest.raises(UserError, match=f"{path} is not an optimizer's state: 'a.npy' in it is compressed; .*; load "):
        state_file.read_arrays(str(path))


def test_a_file_larger_than_half_of_the_memory_is_not_read(tmp_path):
    path = tmp_path / "m-0001.pt"
    path.write_bytes(b"x" * 10)
    assert bounded.read(path, 10) == b"x" * 10
    with pytest.raises(OSError, match="it has 10 bytes, the limit is 9 bytes"):
        bounded.read(path, 9)
    with path.open("wb") as file:
        file.truncate(1 << 43)  # eight terabytes that need no disk
    with pytest.raises(UserError, match="it has 8796093022208 bytes, the limit is half of this machine's memory"):
        state_file.read_state(str(path))
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(UserError, match="not a regular file"):
        state_file.read_state(str(path))


# -- the last line of a checkpoint ------------------------------------------------------------------------------------


rng = random.Random(1)


def two_arrays() -> bytes:
    return saved(a=np.arange(20.0), b=np.zeros((3, 3)))


def pt() -> bytes:
    import torch

    stream = io.BytesIO()
    torch.save({"a": torch.arange(20.0), "b": [1, "two"]}, stream)
    return stream.getvalue()


def params() -> bytes:
    return b"\x12\1\0\0\0\0\0\0" + bytes(range(256))  # an MXNet file is any bytes to this module


KINDS = {".npz": two_arrays, ".pt": pt, ".params": params}


@pytest.mark.parametrize("suffix", KINDS)
def test_the_digest_is_that_of_sha256sum(suffix):
    whole = seal.sealed(KINDS[suffix]())
    assert seal.examine(whole, suffix) == seal.Examined(whole, hashlib.sha256(whole).hexdigest(), "")
    assert seal.examine(b"", suffix).digest == hashlib.sha256(b"").hexdigest()


@pytest.mark.parametrize("suffix", KINDS)
def test_a_bit_that_flips_anywhere_before_the_last_line_is_found(suffix):
    whole = seal.sealed(KINDS[suffix]())
    content = len(whole) - seal.LINE_BYTES
    for byte in range(content):
        flipped = bytearray(whole)
        flipped[byte] ^= 1 << rng.randrange(8)
        assert seal.examine(bytes(flipped), suffix).damage.startswith("its content has sha256 "), byte


@pytest.mark.parametrize("suffix", seal.ARCHIVES)
def test_an_archive_with_a_damaged_last_line_is_not_whole(suffix):
    whole = seal.sealed(KINDS[suffix]())
    for byte in range(len(whole) - seal.LINE_BYTES, len(whole)):
        flipped = bytearray(whole)
        flipped[byte] ^= 1
        assert seal.examine(bytes(flipped), suffix).damage, byte


@pytest.mark.parametrize("suffix", seal.ARCHIVES)
@pytest.mark.parametrize("sealing", [bytes, seal.sealed], ids=["0.4", "with a digest"])
def test_an_archive_that_is_cut_anywhere_is_not_whole(suffix, sealing):
    whole = sealing(KINDS[suffix]())
    for length in range(0, len(whole), 7):
        assert seal.examine(whole[:length], suffix).damage, length
    assert seal.examine(whole[:-1], suffix).damage
    assert seal.examine(whole + b"\0", suffix).damage
    assert not seal.examine(whole, suffix).damage


def test_an_archive_of_0_4_names_the_damaged_member_and_compressed_ones_are_not_unpacked():
    whole = bytearray(two_arrays())
    data = bytes(whole).index(np.arange(20.0).tobytes())
    whole[data + 40] ^= 4
    assert seal.examine(bytes(whole), ".npz").damage == f"a.npy of its {len(whole)} bytes is unreadable"
    stream = io.BytesIO()
    np.savez_compressed(stream, a=np.zeros(1 << 23))
    assert seal.examine(stream.getvalue(), ".npz").damage.startswith("'a.npy' in it is compressed; expected an")


def test_numpy_and_unzip_read_the_file_as_before():
    whole = seal.sealed(two_arrays())
    with np.load(io.BytesIO(whole), allow_pickle=False) as found:
        assert found["a"].tolist() == list(range(20)) and found["b"].shape == (3, 3)
    assert zipfile.ZipFile(io.BytesIO(whole)).testzip() is None


@pytest.mark.parametrize("mapped", [False, True])
def test_pytorch_reads_the_file_as_before(tmp_path, mapped):
    import torch

    path = tmp_path / "m-0001.pt"
    path.write_bytes(seal.sealed(pt()))
    found = torch.load(path, weights_only=True, mmap=mapped)
    assert found["a"].tolist() == list(range(20)) and found["b"] == [1, "two"]


def test_mxnet_reads_the_file_as_before(mx, tmp_path):
    path = tmp_path / "m-0001.params"
    mx.nd.save(str(path), {"arg:a": mx.nd.arange(20)})
    path.write_bytes(seal.sealed(path.read_bytes()))
    assert mx.nd.load(str(path))["arg:a"].asnumpy().tolist() == list(range(20))
    assert mx.nd.load_frombuffer(path.read_bytes())["arg:a"].asnumpy().tolist() == list(range(20))
