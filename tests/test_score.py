"""examples/score.py: any checkpoint's accuracy, by one process or a job."""

import re
from pathlib import Path

import numpy as np
import pytest

from dmltrain import score
from dmltrain.backends.table import BACKENDS
from dmltrain.base.errors import UserError
from dmltrain.checkpoints import checkpoint, pretrained_weights
from dmltrain.checkpoints.pretrained_weights import Trained
from dmltrain.checkpoints.seal import sealed
from dmltrain.options import parse
from tests.mxnet_files.test_params import V2, array, file
from tests.test_fit import EXAMPLES, RESNET, Log, backend, job, run, saved, train  # noqa: F401  (fixtures)

DIGITS = ["--dataset", "digits", "--kv-store", "local"]


@pytest.fixture
def scored(capfd):
    def scored_here(*words: object, code: int = 0) -> Log:
        found = score.main([str(word) for word in words], prog="score", defaults={"batch_size": 32})
        text = capfd.readouterr().err
        assert found == code and "Traceback" not in text, text
        return Log(text)

    return scored_here


def metrics(log: Log) -> list[tuple[str, str]]:
    return re.findall(r"Epoch\[1\] (Validation-\S+)=(\S+)", log.text)


def test_a_checkpoint_scores_as_its_training_said(train, scored, backend, tmp_path):  # noqa: F811
    words = "--batch-size 32 --num-epochs 2 --top-k 3 --num-examples 300 --model-prefix"
    average = ["--ema-decay", 0.9] if backend == "torch" else []
    trained = train(*RESNET, *words.split(), tmp_path / "m", *average)
    here = scored(*DIGITS, "--backend", backend, "--top-k", 3, "--model-prefix", tmp_path / "m")
    assert metrics(here) == metrics(trained) and len(metrics(here)) == (6 if average else 3)
    assert f"Scored {saved(tmp_path / 'm', 2, backend)} on 360 samples of digits" in here.text
    other = {"torch": "mxnet", "mxnet": "torch"}[backend]
    there = scored(*DIGITS, "--backend", other, "--model", tmp_path / "m", "--load-epoch", 2)
    assert metrics(there)[0] == metrics(trained)[0], "the other backend computes the same"
    assert "Epoch[0] Validation-accuracy" in scored(*DIGITS, "--model-prefix", tmp_path / "m", "--load-epoch", 1).text


def test_a_snapshot_scores_in_its_epoch(run, scored, tmp_path):  # noqa: F811
    run("--num-examples", 300, "--max-iter", 12, "--model-prefix", tmp_path / "m")
    words = [*DIGITS, "--model-prefix", tmp_path / "m"]
    for more in ([], ["--load-epoch", "last"], ["--load-iteration", 12]):
        log = scored(*words, *more)
        assert "m-0001_iter_12.pt on 360" in log.text and len(metrics(log)) == 2
    text = scored(*words, "--load-iteration", 11, code=2).text
    assert f"no checkpoint {tmp_path}/m-EPOCH_iter_11; present in {tmp_path}: m-0001.pt, m-0001_iter_12.pt" in text


def test_what_cannot_be_scored_is_explained(run, scored, tmp_path):  # noqa: F811
    assert "--model-prefix is missing" in scored(*DIGITS, code=2).text
    text = scored(*DIGITS, "--model-prefix", tmp_path / "m", code=2).text
    assert "no checkpoint of" in text and f"{tmp_path}/m-0001.pt, .npz, .params" in text
    run("--num-examples", 300, "--num-epochs", 1, "--model-prefix", tmp_path / "m")
    text = scored(*DIGITS, "--model-prefix", tmp_path / "m", "--network", "resnet", "--num-layers", 8, code=2).text
    assert "belong to another network than resnet-8" in text


def test_the_network_is_the_checkpoints():
    said = {"network": "resnet-v1-20", "num_layers": 20}
    found = score.network_of(score.Trained(Path("m-0003.pt"), {}, said))
    assert found == {"network": "resnet-v1", "num_layers": 20}
    assert score.network_of(score.Trained(Path("a/m-0003.params"), {}))["network"] == "a/m-symbol.json"
    with pytest.raises(score.UserError, match="weights of network 'own'.*--network"):
        score.network_of(score.Trained(Path("m-0003.pt"), {}, {"network": "own", "num_layers": None}))


@pytest.mark.thorough
def test_a_checkpoint_of_mxnet_scores_as_in_mxnet(scored, mxnet_files, real_data):
    words = ["--dataset", "mnist", "--data-dir", real_data / "mnist", "--model-prefix", mxnet_files / "lenet"]
    assert "Epoch[1] Validation-accuracy=0.987400\n" in scored(*words).text


@pytest.mark.thorough
def test_image_files_are_scored_as_in_training(run, scored, tmp_path, mxnet_files):  # noqa: F811
    data = ["--dataset", "imagenet", "--data-val", mxnet_files / "sample.rec"]
    words = "--network resnet --num-layers 8 --image-shape 3,28,28 --num-classes 1000 --resize 32 --num-epochs 2"
    files = ["--data-train", mxnet_files / "sample.rec", *data, "--model-prefix", tmp_path / "m"]
    trained = run(*words.split(), *files)
    assert metrics(scored(*data, "--resize", 32, "--model-prefix", tmp_path / "m")) == metrics(trained) != []
    assert "give --data-val" in scored(*data[:2], "--data-train", data[3], "--model", tmp_path / "m", code=2).text


@pytest.mark.thorough
def test_a_graph_of_mxnet_has_its_own_classes(scored, mxnet_files):
    """Ten, whatever the labels of the files are: 215 classes here."""
    words = ["--dataset", "imagenet", "--data-val", mxnet_files / "sample.rec", "--image-shape", "3,28,28"]
    text = scored(*words, "--model-prefix", mxnet_files / "resnet20", code=2).text
    assert "label" in text and "10" in text


@pytest.mark.thorough
def test_workers_score_together_and_take_worker_0s_file(run, scored, tmp_path):  # noqa: F811
    run(*RESNET, "--num-examples", 300, "--num-epochs", 2, "--model-prefix", tmp_path / "m")
    alone = scored(*DIGITS, "--model-prefix", tmp_path / "m", "--top-k", 5)
    words = ["--dataset", "digits", "--kv-store", "dist_sync", "--model-prefix", tmp_path / "m"]
    with job(tmp_path / "job", 2, 1, EXAMPLES / "score.py", *words) as running:
        assert set(running.wait().values()) == {0}, running.text()
        for worker in range(2):
            assert metrics(running.log(worker)) == metrics(alone)


@pytest.mark.thorough
def test_the_input_of_mxnets_programs_is_named(scored, mxnet_files):
    words = ["--dataset", "synthetic", "--image-shape", "3,28,28", "--num-val-examples", 40]
    words += ["--model-prefix", mxnet_files / "resnet20"]
    assert "then add --rgb-mean 123.68,116.779,103.939 --rgb-std 1,1,1; now" in scored(*words).text
    given = scored(*words, "--rgb-mean", "123.68,116.779,103.939", "--rgb-std", "1,1,1")
    assert "--rgb-mean 123.68,116.779,103.939 --rgb-std 1,1,1; now" not in given.text


@pytest.mark.parametrize("num_classes, expected", [(3, 0), (5, 0), (6, 5)])
def test_a_default_of_top_k_suits_the_checkpoint(num_classes, expected):
    options = parse(["--dataset", "imagenet", "--data-val", "v.rec", "--top-k", "5"])
    found = Trained(Path("m-0001.pt"), {}, {"network": "mlp", "num_layers": None, "num_classes": num_classes})
    assert score.as_saved(options, found, ()).top_k == expected
    assert score.as_saved(options, found, ("top_k",)).top_k == 5


# -- weights of any checkpoint, by name -------------------------------------------------------------------------------


ARRAYS = {"fc_weight": np.arange(6, dtype=np.float32).reshape(2, 3), "bn_moving_var": np.ones(2, np.float32)}
SAID = {"network": "mlp", "num_layers": None, "num_classes": 10, "image_shape": [1, 8, 8]}


def write(folder, epoch, by):
    """A checkpoint of dmltrain's own."""
    pytest.importorskip(by, reason=f"{by} is not installed")
    model = dict(ARRAYS)
    if by == "torch":
        import torch

        model = {name: torch.from_numpy(each) for name, each in ARRAYS.items()}
    content = {"format": checkpoint.FORMAT, **SAID, "optimizer": "sgd", "state": {"model": model, "optimizer": {}}}
    able = BACKENDS[by].capabilities
    target = checkpoint.path(str(folder / "m"), epoch, able.suffix)
    target.write_bytes(sealed(BACKENDS[by].encode(content)))
    return target


@pytest.mark.parametrize("by", ["torch", "mxnet"])
def test_own_checkpoints_have_weights_and_say_of_which_network(tmp_path, by):
    target = write(tmp_path, 3, by)
    found = pretrained_weights.load(target)
    assert found.facts == SAID and found.source == target and found.weights.keys() == ARRAYS.keys()
    assert all(
        np.array_equal(weight, ARRAYS[name]) and weight.dtype == np.float32 for name, weight in found.weights.items()
    )


def test_weights_of_mxnet_have_the_networks_names(tmp_path):
    target = tmp_path / "m-0007.params"
    content = file(array(V2), array(V2, kind=1, data=np.arange(6.0).tobytes()), names=(b"arg:a", b"aux:b"))
    target.write_bytes(content)
    found = pretrained_weights.load(target, names={"fc_weight": "a"})
    assert list(found.weights) == ["fc_weight", "b"] and found.facts == {}
    assert found.weights["b"].dtype == np.float32 and found.weights["b"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert list(pretrained_weights.load(Path("other/m-0007.params"), content).weights) == ["a", "b"]


def test_the_newest_whole_file_is_found_and_own_files_come_first(tmp_path):
    prefix = str(tmp_path / "m")
    with pytest.raises(UserError, match="no checkpoint of .*m is whole: there is no .*m-0001.pt"):
        pretrained_weights.find(prefix)
    own = write(tmp_path, 2, "torch")
    (tmp_path / "m-0002.params").write_bytes(file(array(V2)))
    newest = tmp_path / "m-0003.params"
    newest.write_bytes(file(array(V2)))
    assert pretrained_weights.find(prefix) == newest and pretrained_weights.find(prefix, 2) == own
    newest.write_bytes(b"noise")
    assert pretrained_weights.find(prefix) == own
    own.unlink()
    (tmp_path / "m-0002.params").write_bytes(b"noise")
    with pytest.raises(UserError, match="m is whole: .*m-0003.params: 16 bytes .*; .*m-0002.params: 16 bytes"):
        pretrained_weights.find(prefix)
    with pytest.raises(UserError, match="no checkpoint .*m-0009.pt; present in .*: m-0002.params, m-0003.params"):
        pretrained_weights.load(pretrained_weights.find(prefix, 9))


def test_other_files_are_refused(tmp_path):
    (tmp_path / "m-0001.bin").write_bytes(b"")
    with pytest.raises(UserError, match="m-0001.bin is no checkpoint: expected one of .pt, .npz, .params"):
        pretrained_weights.load(tmp_path / "m-0001.bin")
    damaged = write(tmp_path, 1, "torch")
    damaged.write_bytes(damaged.read_bytes()[:-9])
    with pytest.raises(UserError, match="is damaged or truncated"):
        pretrained_weights.load(damaged)
