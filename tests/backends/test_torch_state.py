"""A checkpoint of PyTorch takes no more memory than its file, names what a checkpoint needs, and runs no code."""

import io
import pickle
import zipfile

import pytest
import torch

from dmltrain.backends.torch import state
from dmltrain.base.errors import UserError
from dmltrain.checkpoints import seal
from tests.fuzzing import peak

CONTENT = {
    "model": {"weight": torch.arange(6.0).reshape(2, 3).t(), "count": torch.tensor(5)},
    "optimizer": {"state": {0: {"step": torch.tensor(1.0)}}, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99)}]},
    "residuals": {"server 0": torch.zeros(3, dtype=torch.uint8), "worker 0": torch.zeros(2, dtype=torch.bfloat16)},
}


def remade(change, compression=zipfile.ZIP_STORED):
    """A checkpoint whose pickle is `change(pickle)`."""
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(state.encode(CONTENT))) as old, zipfile.ZipFile(made, "w", compression) as new:
        for member in old.namelist():
            data = old.read(member)
            new.writestr(member, change(data) if member.endswith("data.pkl") else data)
    return made.getvalue()


@pytest.mark.parametrize("content", [state.encode(CONTENT), seal.sealed(state.encode(CONTENT)), remade(bytes)])
def test_what_was_written_is_read(content):
    found = state.decode(content)
    assert torch.equal(found["model"]["weight"], CONTENT["model"]["weight"])
    assert found["optimizer"] == CONTENT["optimizer"] and found["residuals"]["worker 0"].dtype == torch.bfloat16


def evil(text):
    return remade(lambda old: b"\x80\x02" + text + b".")


def wide(*path):
    """A tensor of 2 ** 40 elements that are all the same one, in lists and dictionaries."""
    content = torch.zeros(1).expand(1 << 20, 1 << 20)
    for kind in path:
        content = kind([("a", content)]) if kind is dict else kind([content])
    stream = io.BytesIO()
    torch.save(content, stream)
    return stream.getvalue()


BAD = {
    "noise": (b"nothing of torch's", ""),
    "pickle": (pickle.dumps({"a": 1}), ""),
    "bytearray": (evil(b"cbuiltins\nbytearray\nJ\xff\xff\xff\x0f\x85R"), "builtins bytearray"),
    "Tensor": (evil(b"ctorch\nTensor\nJ\xff\xff\xff\x0f\x85R"), "torch Tensor"),
    "system": (evil(b"cos\nsystem\nU\x09touch ran\x85R"), "os system"),
    "list": (evil(b"]"), "a list"),
    "deep": (evil(b"}X\1\0\0\0a" + b"]" * 50_000 + b"a" * 49_999 + b"s"), "recursion"),
    "wide in a list": (wide(list, tuple, dict), r"\[1048576, 1048576\]"),
    "wide": (wide(dict), r"\[1048576, 1048576\]"),
    "compressed": (remade(bytes, zipfile.ZIP_DEFLATED), "compressed"),
    "two formats": (pickle.dumps({"a": 1}, 2) + state.encode(CONTENT), "archive is altered"),
}


@pytest.mark.parametrize("case", BAD)
def test_other_content_is_refused_before_it_takes_memory_or_runs(case, tmp_path, monkeypatch):
    content, reason = BAD[case]
    monkeypatch.chdir(tmp_path)
    state.decode(state.encode(CONTENT))
    before = peak()
    with pytest.raises(UserError, match=f"^not a checkpoint: .*{reason}") as refused:
        state.decode(content)
    assert len(str(refused.value).splitlines()) == 1 and len(str(refused.value)) < 220
    assert peak() - before < 64 << 20 and not list(tmp_path.iterdir())


def test_an_archive_that_begins_as_another_format_is_refused():
    """torch.load tells formats apart by the first bytes; the offsets in this archive count from them."""
    made = io.BytesIO(pickle.dumps({"a": 1}, 2))
    made.seek(0, io.SEEK_END)
    with zipfile.ZipFile(made, "a") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}.")
    with pytest.raises(UserError, match="from its start"):
        state.decode(made.getvalue())


def test_equal_arrays_have_equal_digests_in_any_memory_format():
    plain = torch.arange(24.0).reshape(2, 3, 2, 2)
    last = plain.to(memory_format=torch.channels_last).requires_grad_()
    assert state.digest({"w": plain}) == state.digest({"w": last}) != state.digest({"v": plain})
