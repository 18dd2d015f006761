"""Weights of any checkpoint, by name."""

from pathlib import Path

import numpy as np
import pytest

from dmltrain import checkpoint, trained
from dmltrain.backends.table import BACKENDS
from dmltrain.errors import UserError
from dmltrain.wholeness import sealed
from tests.mxnet_files.test_params import V2, array, file

ARRAYS = {"fc_weight": np.arange(6, dtype=np.float32).reshape(2, 3), "bn_moving_var": np.ones(2, np.float32)}
SAID = {"network": "mlp", "num_layers": None, "num_classes": 10, "image_shape": [1, 8, 8]}


def write(folder, epoch, backend):
    """A checkpoint of dmltrain's own."""
    pytest.importorskip(backend, reason=f"{backend} is not installed")
    model = dict(ARRAYS)
    if backend == "torch":
        import torch

        model = {name: torch.from_numpy(each) for name, each in ARRAYS.items()}
    content = {"format": checkpoint.FORMAT, **SAID, "optimizer": "sgd", "state": {"model": model, "optimizer": {}}}
    able = BACKENDS[backend].capabilities
    target = checkpoint.path(str(folder / "m"), epoch, able.suffix)
    target.write_bytes(sealed(BACKENDS[backend].encode(content)))
    return target


@pytest.mark.parametrize("backend", ["torch", "mxnet"])
def test_own_checkpoints_have_weights_and_say_of_which_network(tmp_path, backend):
    target = write(tmp_path, 3, backend)
    found = trained.load(target)
    assert found.said == SAID and found.source == target and found.weights.keys() == ARRAYS.keys()
    assert all(np.array_equal(each, ARRAYS[name]) and each.dtype == np.float32 for name, each in found.weights.items())


def test_weights_of_mxnet_have_the_networks_names(tmp_path):
    target = tmp_path / "m-0007.params"
    content = file(array(V2), array(V2, kind=1, data=np.arange(6.0).tobytes()), names=(b"arg:a", b"aux:b"))
    target.write_bytes(content)
    found = trained.load(target, names={"fc_weight": "a"})
    assert list(found.weights) == ["fc_weight", "b"] and found.said == {}
    assert found.weights["b"].dtype == np.float32 and found.weights["b"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert list(trained.load(Path("other/m-0007.params"), content).weights) == ["a", "b"]


def test_the_newest_whole_file_is_found_and_own_files_come_first(tmp_path):
    prefix = str(tmp_path / "m")
    with pytest.raises(UserError, match="no checkpoint of .*m is whole: there is no .*m-0001.pt"):
        trained.find(prefix)
    own = write(tmp_path, 2, "torch")
    (tmp_path / "m-0002.params").write_bytes(file(array(V2)))
    newest = tmp_path / "m-0003.params"
    newest.write_bytes(file(array(V2)))
    assert trained.find(prefix) == newest and trained.find(prefix, 2) == own
    newest.write_bytes(b"noise")
    assert trained.find(prefix) == own
    own.unlink()
    (tmp_path / "m-0002.params").write_bytes(b"noise")
    with pytest.raises(UserError, match="m is whole: .*m-0003.params: 16 bytes .*; .*m-0002.params: 16 bytes"):
        trained.find(prefix)
    with pytest.raises(UserError, match="no checkpoint .*m-0009.pt; present in .*: m-0002.params, m-0003.params"):
        trained.load(trained.find(prefix, 9))


def test_other_files_are_refused(tmp_path):
    (tmp_path / "m-0001.bin").write_bytes(b"")
    with pytest.raises(UserError, match="m-0001.bin is no checkpoint: expected one of .pt, .npz, .params"):
        trained.load(tmp_path / "m-0001.bin")
    damaged = write(tmp_path, 1, "torch")
    damaged.write_bytes(damaged.read_bytes()[:-9])
    with pytest.raises(UserError, match="is damaged or truncated"):
        trained.load(damaged)
