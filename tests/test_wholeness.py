"""The last line of a checkpoint: it finds every damage, and other programs read the file as before."""

import hashlib
import io
import random
import zipfile

import numpy as np
import pytest

from dmltrain import wholeness

rng = random.Random(1)


def npz() -> bytes:
    stream = io.BytesIO()
    np.savez(stream, a=np.arange(20.0), b=np.zeros((3, 3)))
    return stream.getvalue()


def pt() -> bytes:
    import torch

    stream = io.BytesIO()
    torch.save({"a": torch.arange(20.0), "b": [1, "two"]}, stream)
    return stream.getvalue()


def params() -> bytes:
    return b"\x12\1\0\0\0\0\0\0" + bytes(range(256))  # an MXNet file is any bytes to this module


KINDS = {".npz": npz, ".pt": pt, ".params": params}


@pytest.mark.parametrize("suffix", KINDS)
def test_the_digest_is_that_of_sha256sum(suffix):
    whole = wholeness.sealed(KINDS[suffix]())
    assert wholeness.examine(whole, suffix) == wholeness.Examined(whole, hashlib.sha256(whole).hexdigest(), "")
    assert wholeness.examine(b"", suffix).digest == hashlib.sha256(b"").hexdigest()


@pytest.mark.parametrize("suffix", KINDS)
def test_a_bit_that_flips_anywhere_before_the_last_line_is_found(suffix):
    whole = wholeness.sealed(KINDS[suffix]())
    content = len(whole) - wholeness.LINE_BYTES
    for byte in range(content):
        flipped = bytearray(whole)
        flipped[byte] ^= 1 << rng.randrange(8)
        assert wholeness.examine(bytes(flipped), suffix).damage.startswith("its content has sha256 "), byte


@pytest.mark.parametrize("suffix", wholeness.ARCHIVES)
def test_an_archive_with_a_damaged_last_line_is_not_whole(suffix):
    whole = wholeness.sealed(KINDS[suffix]())
    for byte in range(len(whole) - wholeness.LINE_BYTES, len(whole)):
        flipped = bytearray(whole)
        flipped[byte] ^= 1
        assert wholeness.examine(bytes(flipped), suffix).damage, byte


@pytest.mark.parametrize("suffix", wholeness.ARCHIVES)
@pytest.mark.parametrize("seal", [bytes, wholeness.sealed], ids=["0.4", "with a digest"])
def test_an_archive_that_is_cut_anywhere_is_not_whole(suffix, seal):
    whole = seal(KINDS[suffix]())
    for length in range(0, len(whole), 7):
        assert wholeness.examine(whole[:length], suffix).damage, length
    assert wholeness.examine(whole[:-1], suffix).damage
    assert wholeness.examine(whole + b"\0", suffix).damage
    assert not wholeness.examine(whole, suffix).damage


def test_an_archive_of_0_4_names_the_damaged_member():
    whole = bytearray(npz())
    data = bytes(whole).index(np.arange(20.0).tobytes())
    whole[data + 40] ^= 4
    assert wholeness.examine(bytes(whole), ".npz").damage == f"a.npy of its {len(whole)} bytes is unreadable"


def test_an_archive_with_compressed_members_is_damaged_and_is_not_unpacked():
    stream = io.BytesIO()
    np.savez_compressed(stream, a=np.zeros(1 << 23))
    assert wholeness.examine(stream.getvalue(), ".npz").damage.startswith("'a.npy' in it is compressed; expected an")


def test_numpy_and_unzip_read_the_file_as_before():
    whole = wholeness.sealed(npz())
    with np.load(io.BytesIO(whole), allow_pickle=False) as found:
        assert found["a"].tolist() == list(range(20)) and found["b"].shape == (3, 3)
    assert zipfile.ZipFile(io.BytesIO(whole)).testzip() is None


@pytest.mark.parametrize("mapped", [False, True])
def test_pytorch_reads_the_file_as_before(tmp_path, mapped):
    import torch

    path = tmp_path / "m-0001.pt"
    path.write_bytes(wholeness.sealed(pt()))
    found = torch.load(path, weights_only=True, mmap=mapped)
    assert found["a"].tolist() == list(range(20)) and found["b"] == [1, "two"]


def test_mxnet_reads_the_file_as_before(mx, tmp_path):
    path = tmp_path / "m-0001.params"
    mx.nd.save(str(path), {"arg:a": mx.nd.arange(20)})
    path.write_bytes(wholeness.sealed(path.read_bytes()))
    assert mx.nd.load(str(path))["arg:a"].asnumpy().tolist() == list(range(20))
    assert mx.nd.load_frombuffer(path.read_bytes())["arg:a"].asnumpy().tolist() == list(range(20))
