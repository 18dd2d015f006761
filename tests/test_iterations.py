"""What training programs do by iteration: tests, snapshots, the end of a run, steps of several batches, the monitor."""

import os
import re

import numpy as np
import pytest

from dmltrain import models
from dmltrain.checkpoints import checkpoint
from dmltrain.data.images import mixing
from dmltrain.report import reading
from tests.mxnet_files import made
from tests.test_fit import RESNET, SYNC, backend, finished, job, run, saved, train  # noqa: F401  (fixtures)

pytestmark = pytest.mark.filterwarnings("ignore:Please import `csr_matrix`:DeprecationWarning")  # MXNet's own
ACCURACIES = ("train_accuracy", "validation_accuracy", "validation_cross_entropy")
SMALL = ["--num-examples", 300, "--batch-size", 32]  # 10 batches in an epoch


def names(folder) -> list[str]:
    return sorted(each for each in os.listdir(folder) if each.endswith((".pt", ".npz")))


def steps(log) -> list[tuple[str, str]]:
    """(iteration, accuracy) of the tests in mid-epoch."""
    return re.findall(r"Node\[0\] Step\[(\d+)\] Validation-accuracy=(\S+)", log.text)


# -- tests ------------------------------------------------------------------------------------------------------------


def test_a_test_interval_adds_lines_and_changes_nothing_else(train):  # noqa: F811
    words = ["--batch-size", 64, "--num-epochs", 2, "--num-examples", 300, "--top-k", 2, "--disp-batches", 1]
    plain, tested = train(*words), train(*words, "--test-interval", 2)
    assert [iteration for iteration, _ in steps(tested)] == ["2", "4", "6", "8", "10"]
    assert steps(tested)[4][1] == tested.values("Validation-accuracy")[1]
    assert len(re.findall(r"Step\[\d+\] Validation-top_k_accuracy_2=", tested.text)) == 5
    assert tested.results() == plain.results() and steps(plain) == []


def test_no_parser_takes_lines_in_mid_epoch_for_an_epochs(run, tmp_path):  # noqa: F811
    """Neither dmltrain-parse nor MXNet's tools/parse_log.py, whose patterns these are."""
    words = [*SMALL, "--num-epochs", 2]
    logs = [run(*words, *more) for more in ([], ["--test-interval", 3, "--monitor", 3])]
    assert logs[1].text.count("Step[") == 12 and logs[1].text.count("Batch:       3 ") == 6
    found = []
    for number, log in enumerate(logs):
        (tmp_path / f"{number}.log").write_text(log.text)
        (parsed,) = reading.read(str(tmp_path / f"{number}.log"))
        values = {key: [parsed.epochs[epoch][key] for epoch in parsed.epochs] for key in ACCURACIES}
        patterns = [rf".*Epoch\[(\d+)\] {split}-accuracy.*=([.\d]+)" for split in ("Train", "Validation")]
        found.append((values, list(parsed.epochs), [re.findall(pattern, log.text) for pattern in patterns]))
    assert found[0] == found[1] and found[0][1] == [0, 1]


@pytest.mark.thorough
def test_without_validation_data_there_is_nothing_to_test(run, mxnet_files):  # noqa: F811
    words = ["--dataset", "imagenet", "--data-train", mxnet_files / "sample.rec", "--image-shape", "3,28,28"]
    log = run(*words, "--num-classes", 215, "--network", "mlp", "--test-interval", 2, "--max-iter", 4)
    assert "Validation" not in log.text and len(log.values("Train-accuracy")) == 1


def test_max_iter_ends_the_run_in_an_epoch(train, backend, tmp_path):  # noqa: F811
    prefix = ["--model-prefix", tmp_path / "m"]
    log = train(*SMALL, *prefix, "--max-iter", 13, "--disp-batches", 1)
    assert re.findall(r"Epoch\[1\] Batch \[(\d+)\]", log.text) == ["1", "2"]
    assert len(log.values("Validation-accuracy")) == 2
    suffix = saved(tmp_path / "m", 1, backend).suffix
    assert names(tmp_path) == [f"m-0001{suffix}", f"m-0001_iter_13{suffix}"]
    again = train(*SMALL, *prefix, "--max-iter", 13, "--load-epoch", "last")
    assert "Nothing to train: 13 of --max-iter 13 iterations are done" in again.text and again.digest() == log.digest()
    again = train(*SMALL, *prefix, "--num-epochs", 1, "--load-epoch", 1)
    assert "Nothing to train: 1 of --num-epochs 1 epochs are" in again.text


# -- snapshots --------------------------------------------------------------------------------------------------------


def test_a_run_that_resumes_from_a_snapshot_equals_an_uninterrupted_one(train, backend, tmp_path):  # noqa: F811
    words = ["--optimizer", "adam", "--lr-policy", "poly", "--lr-power", "1", *SMALL, "--num-epochs", 2]
    words += ["--snapshot", 4, "--model-prefix", tmp_path / "m"]
    whole = train(*words)
    suffix = saved(tmp_path / "m", 1, backend).suffix
    all_names = [f"m-{name}{suffix}" for name in ("0000_iter_4", "0000_iter_8", "0001_iter_12", "0001_iter_16")]
    assert names(tmp_path) == sorted([*all_names, f"m-0001{suffix}", f"m-0002{suffix}"])
    for file in tmp_path.glob("m-0002.*"):  # also MXNet's own
        file.unlink()
    last = train(*words, "--load-epoch", "last")
    assert "Loaded checkpoint of epoch 1 and 6 steps of the next\n" in last.text
    early = train(*words, "--load-iteration", 8)
    assert "Loaded checkpoint of epoch 0 and 8 steps of the next\n" in early.text
    at_the_end_of_an_epoch = train(*words, "--load-iteration", 10)
    assert "Loaded checkpoint of epoch 1\n" in at_the_end_of_an_epoch.text
    for resumed in (last, early, at_the_end_of_an_epoch):
        assert resumed.digest() == whole.digest()
        assert resumed.values("Validation-accuracy")[-1] == whole.values("Validation-accuracy")[1]


def test_masks_of_dropout_and_mixings_after_a_snapshot_are_those_of_a_resumed_run(run, tmp_path):  # noqa: F811
    (tmp_path / "with-dropout-symbol.json").write_bytes(made.shared().content())
    words = ["--network", tmp_path / "with-dropout-symbol.json", "--dataset", "synthetic", "--image-shape", "3,9,9"]
    words += ["--num-examples", 16, "--batch-size", 4, "--num-epochs", 1, "--model-prefix", tmp_path / "m"]
    words += ["--mixup", 1, "--cutmix", 1]
    whole = run(*words, "--snapshot", 2)
    saved(tmp_path / "m", 1).unlink()
    assert run(*words, "--snapshot", 2, "--load-iteration", 2).digest() == whole.digest()


def test_which_samples_skip_layers_follows_from_the_step_also_after_a_snapshot(run, tmp_path):  # noqa: F811
    words = ["--network", "resnet-v1b", "--num-layers", 8, "--dataset", "synthetic", "--image-shape", "3,9,9"]
    words += ["--num-examples", 16, "--batch-size", 4, "--num-epochs", 1]
    digests = [run(*words, "--stochastic-depth", rate).digest() for rate in (0, 0.5)]
    snapshots = ["--snapshot", 2, "--model-prefix", tmp_path / "m"]  # which gives other numbers to dropout
    assert digests[0] != digests[1] == run(*words, "--stochastic-depth", 0.5, *snapshots).digest()


def test_a_snapshot_of_epochs_with_other_steps_is_refused(run, tmp_path):  # noqa: F811
    prefix = ["--model-prefix", tmp_path / "m", "--num-epochs", 1]
    run(*SMALL, *prefix, "--max-iter", 7)
    for asked in (["--load-epoch", "last"], ["--load-iteration", 7]):
        text = run("--num-examples", 300, "--batch-size", 64, *prefix, *asked, code=2).text
        assert "m-0000_iter_7.pt is in the middle of an epoch of 10 steps, but this run's have 5" in text
    text = run(*SMALL, *prefix, "--load-iteration", 8, code=2).text
    assert "no checkpoint" in text and "m-0000_iter_8.pt; present in" in text and ": m-0000_iter_7.pt" in text


def test_a_run_that_starts_at_its_end_or_after_it_trains_and_saves_nothing(run, tmp_path):  # noqa: F811
    prefix = ["--model-prefix", tmp_path / "m"]
    run(*SMALL, *prefix, "--max-iter", 7)
    whole = (tmp_path / "m-0000_iter_7.pt").read_bytes()
    for last in (7, 5):
        text = run(*SMALL, *prefix, "--load-iteration", 7, "--max-iter", last).text
        assert f"Nothing to train: 7 of --max-iter {last} iterations are done" in text and "Epoch[0] Time" not in text
    assert names(tmp_path) == ["m-0000_iter_7.pt"] and (tmp_path / "m-0000_iter_7.pt").read_bytes() == whole


@pytest.mark.thorough
def test_workers_agree_on_snapshots_and_resume_from_them(tmp_path):
    """Between two averages, where each worker has weights of its own."""
    averaged = ["dist_local", "--local-steps", 4, "--outer-lr", 0.7, "--outer-momentum", 0.9]
    words = [*SYNC, *RESNET, "--kv-store", *averaged, "--num-epochs", 1, "--test-interval", 3, "--snapshot", 3]
    words += ["--batch-size", 32, "--model-prefix", tmp_path / "m", "--gc-type", "2bit"]
    first = finished(tmp_path / "first", 2, 1, *words)
    assert steps(first[0]) and "m-0000_iter_3.pt" in names(tmp_path)
    assert first[0].digest(0) == first[1].digest(1)
    (tmp_path / "m-0001.pt").unlink()
    resumed = finished(tmp_path / "resumed", 2, 1, *words, "--load-epoch", "last")
    assert "Loaded checkpoint of epoch 0 and 3 steps of the next\n" in resumed[1].text
    assert resumed[0].digest(0) == resumed[1].digest(1)
    assert resumed[0].digest(0) == first[0].digest(0)


def test_checkpoints_every_second_epoch_and_after_the_last(train, backend, tmp_path):  # noqa: F811
    log = train(*SMALL, "--num-epochs", 5, "--save-period", 2, "--model-prefix", tmp_path / "m")
    assert names(tmp_path) == [saved(tmp_path / "m", epoch, backend).name for epoch in (2, 4, 5)]
    assert log.text.count("Saved checkpoint to") == 3


# -- steps of several batches -----------------------------------------------------------------------------------------


def losses(log) -> list[float]:
    return [float(each) for each in log.values("Validation-cross-entropy")]


@pytest.mark.parametrize("devices", ["cpu", "cpu:2"])
def test_a_macrobatch_is_one_step_of_a_large_batch(train, devices):  # noqa: F811
    """Up to rounding. 300 samples are 3 steps of 3 x 32 and one of 12."""
    words = ["--num-examples", 300, "--num-epochs", 2, "--devices", devices]
    large = train(*words, "--batch-size", 96)
    small = train(*words, "--batch-size", 32, "--macrobatch-size", 96)
    assert losses(small) == pytest.approx(losses(large), rel=1e-4)
    assert losses(train(*words, "--batch-size", 32)) != pytest.approx(losses(large), rel=1e-2)


@pytest.mark.thorough
def test_workers_add_up_their_batches(run, tmp_path):  # noqa: F811
    """Two workers with two batches of 16 for a step make the steps of one process with batches of 64."""
    common = ["--network", "mlp", "--num-examples", 320, "--num-epochs", 1, "--lr", 0.02, "--disp-batches", 100]
    words = [*common, "--batch-size", 16, "--kv-store", "dist_sync", "--update-on-kvstore", "1"]
    logs = finished(tmp_path / "job", 2, 1, *words, "--macrobatch-size", 64)
    assert logs[0].digest(0) == logs[1].digest(1)
    assert losses(logs[0]) == pytest.approx(losses(run(*common, "--batch-size", 64)), rel=1e-4)


# -- reports ----------------------------------------------------------------------------------------------------------


def test_the_monitor_logs_the_size_of_each_weight(train, backend, tmp_path):  # noqa: F811
    log = train(*SMALL, "--num-epochs", 1, "--monitor", 4, "--model-prefix", tmp_path / "m", "--max-iter", 8)
    found = re.findall(r"Node\[0\] Batch: {7}(\d) (\w+) +(\S+)\n", log.text)
    network = models.create("mlp", None, 10, (1, 8, 8))
    expected = [parameter.name for parameter in network.parameters()]
    assert [(number, name) for number, name, _ in found] == [(each, name) for each in "48" for name in expected]
    if backend == "torch":
        import torch

        path = checkpoint.path(tmp_path / "m", 0, ".pt", 8)
        model = torch.load(path, weights_only=True)["state"]["model"]
        sizes = [float(np.sqrt(np.mean(model[name].double().numpy() ** 2))) for name in expected]
        assert [float(size) for _, _, size in found[len(expected) :]] == pytest.approx(sizes, rel=1e-6)


def test_losses_are_metrics_by_mxnets_names(train):  # noqa: F811
    log = train(*SMALL, "--num-epochs", 1, "--loss", "ce,nll_loss")
    assert log.values("Train-nll-loss") == log.values("Train-cross-entropy") != []
    assert log.values("Validation-nll-loss") == log.values("Validation-cross-entropy") != []


PROGRAM = """
from dmltrain import fit
from dmltrain.data.images import mixing

drawn = mixing.drawn


def printed(*given):
    print("MIXED", drawn(*given))
    return drawn(*given)


mixing.drawn = printed
fit.main(defaults={"dataset": "digits", "network": "mlp", "disp_batches": 100})
"""


def test_two_workers_draw_the_mixings_of_one_process(tmp_path, monkeypatch, run):  # noqa: F811
    """One of each batch: with two batches in a step, another one for each."""
    words = ["--num-examples", 300, "--num-epochs", 2, "--macrobatch-size", 64, "--mixup", 0.4, "--cutmix", 1]
    words += ["--mixup-prob", 0.9]
    made, drawn = [], mixing.drawn
    monkeypatch.setattr(mixing, "drawn", lambda *given: made.append(drawn(*given)) or made[-1])
    run(*words, "--batch-size", 32)
    (tmp_path / "program.py").write_text(PROGRAM)
    sync = [*words, "--kv-store", "dist_sync", "--batch-size", 16]
    with job(tmp_path / "job", 2, 1, tmp_path / "program.py", *sync) as running:
        running.succeed()
        for worker in range(2):
            assert re.findall("MIXED (.*)", running.text(worker)) == list(map(str, made))
    assert len(made) == 20 and len(set(made)) > 15 and None in made
