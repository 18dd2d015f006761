"""Checkpoint files: complete or not written, and refused with a reason."""

import errno
import io
import os
import zipfile
from pathlib import Path

import pytest

from dmltrain.base import whole_file
from dmltrain.base.errors import UserError
from dmltrain.checkpoints import checkpoint, seal


def archive(text: str = "weights") -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr(zipfile.ZipInfo("data"), text * 100)  # which has no time of day: the same bytes at every call
    return buffer.getvalue()


def test_names_count_epochs_from_one():
    assert str(checkpoint.path("out/model", 1)) == "out/model-0001.pt"
    assert str(checkpoint.path("out/model", 12345)) == "out/model-12345.pt"


def test_the_newest_of_a_backend_and_the_others_are_named(tmp_path):
    prefix = str(tmp_path / "m")
    assert checkpoint.last(prefix) == checkpoint.last(str(tmp_path / "missing" / "m")) == ((0, 0), ())
    for name in ("m-0003.npz", "m-0005.params", "m2-0009.pt", "m-0008.pt.part", "mm-0009.npz"):
        (tmp_path / name).write_bytes(archive())
    assert checkpoint.last(prefix, (".npz", ".params")) == ((5, 0), ())
    assert checkpoint.last(prefix, (".npz",)) == ((3, 0), ())
    with pytest.raises(UserError, match="present in .*: m-0005.params; of --backend mxnet: m-0003.npz$"):
        checkpoint.last(prefix, (".pt",))
    (tmp_path / "m-0001.pt").write_bytes(archive())
    assert checkpoint.last(prefix, (".pt",)) == ((1, 0), ())
    present = "m-0003.npz, m-0005.params; of --backend torch: m-0001.pt"
    with pytest.raises(UserError, match=f"no checkpoint .*m-0004.npz; present in .*: {present}$"):
        checkpoint.read(tmp_path / "m-0004.npz")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_keeps_the_previous_checkpoint_and_is_named(tmp_path, number):
    """A real one is in test_whole_file.py."""

    def full():
        raise OSError(number, os.strerror(number))

    target = tmp_path / "m-0001.pt"
    checkpoint.write(target, archive())
    fact = f"cannot write the checkpoint {target} .*: {os.strerror(number)}, free some space there; earlier checkpoints"
    with pytest.raises(UserError, match=fact):
        checkpoint.write(target, archive("new"), confirm=full)
    assert checkpoint.read(target) == archive() and os.listdir(tmp_path) == ["m-0001.pt"]


def test_what_killed_writers_left_is_removed_before_training(tmp_path):
    """Of this prefix alone: another job may write beside it."""
    for name in ("m-0001.pt", "m-00012.npz", "m-symbol.json", "m2-0001.pt", "m-x-0001.pt"):
        (tmp_path / f".{name}.{whole_file.HOST}-0123abcd.part").touch()
    with whole_file.temporary(tmp_path / "m-0003.pt") as (_, alive):
        checkpoint.prepare(str(tmp_path / "m"))
        kept = [alive.name, *(f".{name}.{whole_file.HOST}-0123abcd.part" for name in ("m2-0001.pt", "m-x-0001.pt"))]
        assert sorted(os.listdir(tmp_path)) == sorted(kept)


DAMAGES = {
    "cut": lambda whole: whole[: len(whole) // 2],
    "cut in its last line": lambda whole: whole[:-1],
    "empty": lambda whole: b"",
    "noise": lambda whole: b"noise" * 100,
    "one bit": lambda whole: whole[:60] + bytes([whole[60] ^ 1]) + whole[61:],
}


def test_a_snapshot_is_newer_than_its_epochs_before_and_older_than_its_own(tmp_path):
    prefix = str(tmp_path / "m")
    names = [checkpoint.path(prefix, *saved).name for saved in ((2, ".pt", 1200), (2, ".pt", 900), (2, ".pt"))]
    assert names == ["m-0002_iter_1200.pt", "m-0002_iter_900.pt", "m-0002.pt"]
    for name in names:
        (tmp_path / name).write_bytes(archive())
    for name, saved in zip(names, [(2, 1200), (2, 900), (2, 0)], strict=True):
        assert checkpoint.last(prefix) == (saved, ())
        (tmp_path / name).unlink()
    (tmp_path / "m-0003.pt").write_bytes(archive())
    (tmp_path / names[0]).write_bytes(archive())
    assert checkpoint.last(prefix) == ((3, 0), ())
    with pytest.raises(UserError, match="no checkpoint .*m-0009.pt; present in .*: m-0002_iter_1200.pt, m-0003.pt"):
        checkpoint.read(tmp_path / "m-0009.pt")


@pytest.mark.parametrize("seal", [bytes, seal.sealed], ids=["0.4", "with a digest"])
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_refused_and_skipped(tmp_path, damage, seal):
    for epoch in (1, 2, 3):
        checkpoint.path(str(tmp_path / "m"), epoch).write_bytes(seal(archive()))
    target = tmp_path / "m-0003.pt"
    target.write_bytes(damage(seal(archive())))
    with pytest.raises(UserError, match="damaged or truncated.*m-0001.pt, m-0002.pt; --load-epoch last skips"):
        checkpoint.read(target)
    saved, skipped = checkpoint.last(str(tmp_path / "m"))
    assert saved == (2, 0) and len(skipped) == 1 and skipped[0].startswith(f"{target}: ")
    for epoch in (1, 2):
        checkpoint.path(str(tmp_path / "m"), epoch).write_bytes(b"")
    saved, skipped = checkpoint.last(str(tmp_path / "m"))
    names = [Path(each.partition(": ")[0]).name for each in skipped]
    assert saved == (0, 0) and names == ["m-0003.pt", "m-0002.pt", "m-0001.pt"], "newest first"


def test_another_programs_file_is_judged_by_its_own_reader(tmp_path):
    def load(source):
        raise UserError(f"cannot read the weights in {source}")

    (tmp_path / "m-0001.params").write_bytes(b"arrays")
    assert checkpoint.last(str(tmp_path / "m"), (".npz", ".params")) == ((1, 0), ())
    found = (0, 0), (f"cannot read the weights in {tmp_path}/m-0001.params",)
    assert checkpoint.last(str(tmp_path / "m"), (".npz", ".params"), load) == found
    (tmp_path / "m-0001.npz").write_bytes(archive())
    assert checkpoint.last(str(tmp_path / "m"), (".npz", ".params"), load) == ((1, 0), ()), "the own file counts"


def test_a_file_that_the_disk_cannot_read_is_damaged_and_one_that_may_not_be_read_is_not(tmp_path):
    """Reading the memory of a process from its address 0 is an Input/output error, as with a bad disk."""
    (tmp_path / "m-0001.pt").write_bytes(archive())
    (tmp_path / "m-0002.pt").symlink_to("/proc/self/mem")
    reason = "the disk cannot read it (Input/output error)"
    assert checkpoint.last(str(tmp_path / "m")) == ((1, 0), (f"{tmp_path}/m-0002.pt: {reason}",))
    assert checkpoint.examine(tmp_path / "m-0002.pt").digest == ""
    with pytest.raises(UserError, match="m-0002.pt is damaged or truncated: the disk cannot read it"):
        checkpoint.read(tmp_path / "m-0002.pt")
    (tmp_path / "m-0002.pt").unlink()
    (tmp_path / "m-0002.pt").mkdir()  # an owner makes it readable; training from an older one would replace it
    with pytest.raises(UserError, match="cannot read the checkpoint .*m-0002.pt: Is a directory"):
        checkpoint.last(str(tmp_path / "m"))


def test_a_folder_that_cannot_be_written_is_found_before_training(tmp_path):
    """A checkpoint says so too: neither the file nor its temporary file can be reached."""
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="--model-prefix .*cannot write there"):
        checkpoint.prepare(str(tmp_path / "file" / "m"))
    for _ in range(2):  # also where the folder is there already
        checkpoint.prepare(str(tmp_path / "new" / "m"))
    checkpoint.prepare(f"{tmp_path}/newer/")  # whose files are newer/-0001.pt
    assert os.listdir(tmp_path / "new") == os.listdir(tmp_path / "newer") == []
    with pytest.raises(UserError, match="cannot write the checkpoint .*: Not a directory; earlier checkpoints"):
        checkpoint.write(tmp_path / "file" / "m-0001.pt", archive())


def test_the_error_for_another_networks_checkpoint_or_format_names_the_difference(tmp_path):
    """Files of 0.4 have format 1 and can still be read."""
    found = {"format": checkpoint.FORMAT, "network": "resnet", "num_layers": 20}
    checkpoint.check(tmp_path, found, {"network": "resnet", "num_layers": 20})
    with pytest.raises(UserError, match="num layers 20, expected 56"):
        checkpoint.check(tmp_path, found, {"network": "resnet", "num_layers": 56})
    checkpoint.check("m-0001.pt", {"format": 1}, {})
    for other in (0, 2, "1", None):
        with pytest.raises(UserError, match="expected format 1, found"):
            checkpoint.check("m-0001.pt", {"format": other}, {})
