"""The training programs' command line: old spellings work, and every mistake names what is valid."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from dmltrain import data, models, optimizers, options
from dmltrain.backends.torch.backend import TorchBackend
from dmltrain.base import env
from dmltrain.base.errors import UserError
from dmltrain.kvstore import codec
from dmltrain.optimizers import schedule
from dmltrain.options import mxnet, refused
from dmltrain.options.network import OWN
from dmltrain.train import dry_parse
from tests.copied_tree import search_path

ROOT = Path(__file__).parents[1]
CIFAR10 = {
    **{"network": "resnet", "num_layers": 110, "num_epochs": 300, "batch_size": 128, "lr_step_epochs": "200,250"},
    **{"image_shape": "3,28,28", "dataset": "cifar10"},
}


def parse(line: str, defaults=CIFAR10) -> options.Options:
    return options.parse(line.split(), "train_cifar10.py", defaults=defaults)


def message(line: str) -> str:
    with pytest.raises(UserError) as caught:
        parse(line)
    return str(caught.value)


AS_THEY_ARE = """
--network lenet --kv-store dist_sync --warmup-strategy sqrt --optimizer adam --model-prefix out/m --dtype bfloat16
--gc-type none --transport tcp --host-sum off --data-train-idx train.idx --data-val-idx val.idx --mean-img mean.bin
--shuffle chunk --data-parts local --backend torch --backend mxnet --dataset mnist --memory-format contiguous
"""
WHOLE_NUMBERS = """
--num-layers 20 --num-epochs 7 --num-examples 600 --num-val-examples 7 --batch-size 32 --disp-batches 5 --top-k 5
--data-nthreads 4
--pad-size 4 --fill-value 127 --num-classes 1000 --max-random-h 36 --max-random-s 50 --max-random-l 50
--max-random-rotate-angle 10 --max-crop-size -1 --min-crop-size -1 --resize 256 --aug-level 3 --skip-broken 10 --seed 3
--compile 1 --update-on-kvstore 1
"""
NUMBERS = """
--lr 1e-3 --lr-factor 0.5 --warmup-epochs 5 --mom 0 --wd 0.0005 --gc-threshold 0.1 --gc-ratio 0.1
--min-random-aspect-ratio 0.75 --max-random-aspect-ratio 1.33 --max-random-shear-ratio 0.1 --max-random-scale 1
--min-random-scale 0.533 --max-random-area 1 --min-random-area 0.08 --brightness 0.4 --contrast 0.4 --saturation 0.4
--pca-noise 0.1 --emulate-step 0.15
"""
SWITCHES = """
--benchmark 1 --test-io 0 --random-crop 1 --random-mirror 0 --random-resized-crop 1 --use-imagenet-data-augmentation 1
"""


def each(text, meaning):
    """(flag, value, what it means) of all options in the text."""
    words = text.split()
    return [(flag, value, meaning(value)) for flag, value in zip(words[::2], words[1::2], strict=True)]


@pytest.mark.parametrize(
    "flag, value, expected",
    [
        *each(AS_THEY_ARE, str),
        *each(WHOLE_NUMBERS, int),
        *each(NUMBERS, float),
        *each(SWITCHES, lambda value: value == "1"),
        ("--network", "Inception_BN_28_small", "inception-bn-28-small"),
        ("--lr-step-epochs", "10,20", (10, 20)),
        ("--lr-step-epochs", "", ()),
        ("--data-train", "train.rec", ["train.rec"]),
        ("--data-val", "val.rec", ["val.rec"]),
        ("--rgb-mean", "123.68,116.779,103.939", (123.68, 116.779, 103.939)),
        ("--rgb-std", "1", (1.0,)),
        ("--image-shape", "1,28,28", (1, 28, 28)),
        ("--gpus", "", ()),
        ("--stragglers", "0.05:10", (0.05, 10.0)),
        ("--slow-worker", "4:3", (4, 3.0)),
    ],
)
def test_every_spelling_with_a_space_and_with_an_equals_sign(flag, value, expected):
    name = flag[2:].replace("-", "_")
    for words in ([flag, value], [f"{flag}={value}"]):
        assert getattr(options.parse(words, defaults=CIFAR10), name) == expected


def test_the_programs_defaults_and_the_users_choice_which_inherits_no_depth():
    found = parse("--num-epochs 2")
    assert (found.network, found.num_layers, found.num_epochs, found.lr_step_epochs) == ("resnet", 110, 2, (200, 250))
    assert found.image_shape == (3, 28, 28)
    assert parse("--network lenet").num_layers is None
    assert parse("--network resnet").num_layers == 110


def test_every_option_of_a_network_is_on_the_command_line_and_only_its_own_that_were_given_go_to_it():
    assert parse("").network_options == {}
    assert parse("--network vgg --batch-norm").network_options == {"batch_norm": True}
    assert parse("--network vgg --batch-norm 0").network_options == {"batch_norm": False}
    assert parse("--network resnext --num-group 8").network_options == {"num_group": 8}
    own = {name for row in models.NETWORKS.values() for name in row.options}
    offered = {field.name for field in dataclasses.fields(options.Options) if field.metadata["group"] == OWN}
    assert offered == own


@pytest.mark.parametrize("words", ["--batch 64", "--batch=64"])
def test_batch_with_a_number_is_the_batch_size_as_ever(words):
    """argparse took it for an abbreviation, before there was --batch."""
    options = parse(words)
    assert (options.batch_size, options.batch) == (64, "constant")
    assert parse("--batch per-worker --batch-size 8").batch == "per-worker"


def test_crop_is_an_abbreviation_of_the_image_shape():
    assert parse("--crop 32").image_shape == (3, 32, 32)


@pytest.mark.parametrize(
    "text, names", [("auto", ("auto",)), ("cpu", ("cpu",)), ("cpu:2", ("cpu", "cpu")), ("gpu:2", ("gpu:0", "gpu:1"))]
)
def test_devices(text, names):
    assert parse(f"--devices {text}").device_names == names
    assert parse("").device_names == ("cpu",)


def test_auto_is_the_cpu_where_there_is_no_gpu(monkeypatch):
    monkeypatch.setattr(TorchBackend, "gpus", lambda self: 0)
    assert parse("--devices auto").found().device_names == ("cpu",)


@pytest.mark.parametrize(
    "line, essentials",
    [
        ("--nonsense 3", ["unknown option --nonsense", *options.FLAGS]),
        ("--batchsize=3", ["unknown option --batchsize ", "did you mean --batch-size?"]),
        ("-n 7", ["unknown option -n"]),
        ("file.py", ["unknown option file.py"]),
        ("--network resnest", ["--network", "resnest", ", ".join(sorted(models.NETWORKS))]),
        ("--batch-norm", ["network resnet has no option --batch-norm", "networks with it: vgg"]),
        ("--network resnext --num-group 0", ["--num-group", "'0'", "at least 1"]),
        ("--network vgg --batch-norm yes", ["--batch-norm", "'yes'", "1 (on)", "0 (off)"]),
        ("--dataset imagine", ["--dataset", "imagine", ", ".join(sorted(data.DATASETS))]),
        ("--kv-store dist", ["--kv-store", "'dist'", "dist_async", "dist_sync", "local"]),
        ("--optimizer sdg", ["--optimizer", "sdg", ", ".join(sorted(optimizers.NAMES))]),
        ("--optimizer dcasgd", ["--kv-store device has none", "--kv-store dist_async or dist_ssp", "--optimizer sgd"]),
        ("--optimizer dcasgd --kv-store dist_sync --backend mxnet", ["--kv-store dist_sync has none"]),
        ("--dtype int8", ["--dtype", "int8", "bfloat16, float16, float32"]),
        ("--gc-type 1bit", ["--gc-type", "1bit", ", ".join(sorted(codec.TYPES))]),
        ("--gc-type int8 --kv-store dist_sync --backend mxnet", ["--gc-type int8", "none or 2bit", "--backend torch"]),
        ("--gc-ratio 2", ["--gc-ratio 2", "at most 1"]),
        ("--transport udp", ["--transport", "udp", "auto, shm, tcp"]),
        ("--host-sum no", ["--host-sum", "no", "auto, off"]),
        ("--transport shm --kv-store dist_sync --backend mxnet", ["--transport shm", "--backend torch"]),
        ("--gc-type 2bit --backend mxnet --kv-store device", ["--gc-type 2bit", "--kv-store device"]),
        ("--backend caffe", ["--backend", "caffe", "mxnet, torch"]),
        ("--backend mxnet --kv-store dist_ssp", ["dist_ssp", "dist_sync or dist_async", "--backend torch"]),
        ("--backend mxnet --compile 1", ["--compile", "--backend mxnet", "one graph already; leave it out, or"]),
        ("--backend mxnet --deterministic 0", ["--deterministic", "leave it out, or --backend torch"]),
        *(
            (f"--dtype float16 --kv-store {chosen}", [f"with --kv-store {chosen} servers", "dist_sync or dist_local"])
            for chosen in ("dist_async", "dist_ssp", "dist_sync --update-on-kvstore 1")
        ),
        ("--dtype float16 --optimizer adamax", ["optimizer adamax", "sgd, nag, signum", "--dtype bfloat16"]),
        (
            "--backend mxnet --dtype float16",
            ["--dtype float16", "scale the loss", "float32 or bfloat16", "--backend torch"],
        ),
        ("--batch-size 0", ["--batch-size", "'0'", "at least 1"]),
        ("--batch-size many", ["--batch-size", "'many'"]),
        ("--lr nan", ["--lr", "'nan'"]),
        ("--lr -1", ["--lr", "'-1'"]),
        ("--lr-step-epochs 10,x", ["--lr-step-epochs", "'x'"]),
        ("--image-shape 28,28", ["--image-shape", "28,28", "3,28,28"]),
        ("--gpus 0,0", ["--gpus", "twice"]),
        ("--gpus 0 --devices cpu", ["--devices", "--gpus"]),
        ("--devices tpu", ["--devices", "tpu", "cpu:COUNT"]),
        ("--devices cpu:3 --batch-size 2", ["--batch-size 2", "3 devices"]),
        ("--load-epoch 3", ["--load-epoch", "--model-prefix"]),
        ("--staleness 3", ["--staleness", "dist_ssp"]),
        ("--local-steps 5", ["--local-steps", "dist_local", "this is local"]),
        ("--kv-store dist_sync --outer-lr 0.7", ["--outer-lr", "dist_local", "this is dist_sync"]),
        ("--kv-store dist_async --outer-momentum 0", ["--outer-momentum", "dist_local", "this is dist_async"]),
        ("--kv-store dist_local --local-steps 0", ["--local-steps", "'0'", "at least 1"]),
        ("--kv-store dist_local --outer-lr 0", ["--outer-lr", "'0'", "above 0"]),
        ("--kv-store dist_local --outer-momentum 1", ["--outer-momentum 1", "below 1"]),
        ("--kv-store dist_local --staleness 3", ["--staleness", "dist_ssp", "this is dist_local"]),
        ("--kv-store dist_local --update-on-kvstore 1", ["--update-on-kvstore 1", "each worker's own", "leave --"]),
        ("--kv-store dist_local --gc-type 2bit --gc-threshold 0.5", ["--gc-threshold 0.5", "differences of weights"]),
        ("--kv-store dist_local --factors auto", ["--factors auto", "--kv-store dist_local: use --kv-store dist_sync"]),
        ("--kv-store dist_local --optimizer dcasgd", ["--optimizer dcasgd", "dist_local has none"]),
        ("--kv-store dist_local --backend mxnet", ["dist_local", "local or dist_sync or dist_async", "backend torch"]),
        ("--load-epoch 3 --load-iteration 30 --model-prefix m", ["--load-epoch", "--load-iteration", "one of them"]),
        ("--snapshot 30", ["--snapshot", "--model-prefix"]),
        ("--snapshot-on-signal 5", ["--snapshot-on-signal", "--model-prefix"]),
        ("--loss ce,hinge", ["--loss", "hinge", "bce, ce, nll, nll_loss"]),
        ("--lr-policy cosin", ["--lr-policy", "cosin", ", ".join(sorted(schedule.POLICIES))]),
        ("--min-lr 0.01", ["--min-lr", "--lr-policy multistep", "use poly, pow, cosine, linear, onecycle"]),
        ("--lr-policy linear --lr-restart-epochs 3", ["--lr-restart-epochs", "--lr-policy linear", "use cosine"]),
        ("--lr-policy cosine --lr-restart-factor 2", ["--lr-restart-factor", "needs --lr-restart-epochs"]),
        ("--lr-policy cosine --min-lr 0.5 --lr 0.1", ["--min-lr 0.5", "above --lr 0.1"]),
        ("--lr-policy onecycle --warmup-epochs 2", ["--warmup-epochs", "--lr-peak", "--warmup-lr"]),
        ("--lr-policy onecycle --lr-peak 2", ["--lr-peak 2", "from 0 to 1"]),
        ("--clip-gradient-norm 0", ["--clip-gradient-norm", "'0'", "above 0"]),
        ("--backend mxnet --clip-gradient-norm 1", ["--clip-gradient-norm", "no step between", "--backend torch"]),
        ("--ema-decay 1", ["--ema-decay 1", "below 1"]),
        ("--ema-decay 0.9 --swa-from 3", ["--ema-decay", "--swa-from", "one average"]),
        ("--ema-decay 0.9 --kv-store dist_async", ["--ema-decay", "dist_async", "use --kv-store dist_sync, or --swa"]),
        ("--swa-from 2 --backend mxnet", ["--swa-from", "one copy of the weights", "--backend torch"]),
        ("--sync-bn --kv-store dist_local", ["--sync-bn", "steps of its own", "use --kv-store dist_sync"]),
        ("--sync-bn --compile", ["--sync-bn", "--compile", "leave one of them out"]),
        ("--sync-bn --backend mxnet", ["--sync-bn", "its own device", "--backend torch"]),
        ("--no-wd-on gammas", ["--no-wd-on", "gammas", "biases, norms"]),
        ("--backend mxnet --optimizer muon", ["--optimizer muon", "1.9.1 has none", "--backend torch"]),
        ("--mixup 1 --mixup-prob 1.5", ["--mixup-prob 1.5", "at most 1"]),
        ("--mixup-prob 0.5", ["--mixup-prob", "needs --mixup or --cutmix"]),
        ("--cutmix 1 --mixup-switch-prob 0.2", ["--mixup-switch-prob", "needs --mixup and --cutmix"]),
        ("--cutmix 1 --batch-size 3 --devices cpu:2", ["--cutmix", "--batch-size 3", "--batch-size 4 or more"]),
        ("--backend mxnet --mixup 0.2", ["--mixup", "whole labels", "--backend torch"]),
        ("--backend mxnet --val-flip", ["--val-flip", "once", "--backend torch"]),
        ("--val-image-shape 3,24,24:0", ["--val-image-shape", "'24:0'"]),
        ("--image-shape 3,24,24:0 3,28,28", ["--image-shape", "rising epochs"]),
        ("--image-shape 3,24,24:1 3,28,28:2", ["--image-shape", "rising epochs"]),
        ("--image-shape 3,24,24:0 3,28,28:0", ["--image-shape", "rising epochs"]),
        ("--image-shape 3,24,24:0 1,28,28:1", ["--image-shape", "as many channels"]),
        ("--image-shape 3,24,24:0 3,28,28:1 --crop 28", ["--crop 28", "--image-shape", "leave one out"]),
        ("--label-smoothing 1", ["--label-smoothing 1", "below 1"]),
        ("--bce-threshold 0.2", ["--bce-threshold", "needs --loss bce"]),
        ("--backend mxnet --label-smoothing 0.1", ["--label-smoothing", "gluon's cross-entropy", "--backend torch"]),
        ("--backend mxnet --loss ce,bce", ["--loss bce", "gluon's cross-entropy", "--backend torch"]),
        ("--lr-policy poly", ["--lr-policy poly", "needs --lr-power", "(1 - t / total) ^ power"]),
        ("--lr-policy inv --lr-power 1", ["--lr-policy inv", "needs --lr-factor"]),
        ("--lr-policy step", ["--lr-policy step", "one number", "not 200,250"]),
        ("--lr-policy step --lr-step-epochs 0", ["--lr-policy step", "above 0", "not 0"]),
        ("--lr-policy sigmoid --lr-factor 1 --lr-step-epochs=", ["--lr-policy sigmoid", "not none"]),
        ("--lr-policy step --lr-step-epochs pow2", ["--lr-policy step", "pow2", "exclude"]),
        ("--lr-step-epochs powx", ["--lr-step-epochs", "'x'"]),
        ("--warmup-strategy lars", ["--warmup-strategy lars", "sgd", "--optimizer lbsgd"]),
        ("--profile-worker-suffix p.json", ["--profile-worker-suffix", "Communication", "py-spy"]),
        ("--worker_file=hosts", ["--worker-file", "benchmarks/networks.py"]),
        ("--base-lr 0.1", ["--base-lr", "use --lr"]),
        ("--emulate-step -1", ["--emulate-step", "'-1'", "at least 0"]),
        ("--stragglers 0.05", ["--stragglers", "'0.05'", "PROBABILITY:FACTOR such as 0.05:10"]),
        ("--stragglers 5:10", ["--stragglers", "'5'", "from 0 to 1"]),
        ("--stragglers 0.05:0.1", ["--stragglers", "'0.1'", "at least 1"]),
        ("--slow-worker host4:3", ["--slow-worker", "'host4'", "integer"]),
        ("--lr", ["--lr", "expected one argument"]),
    ],
)
def test_a_mistake_names_what_is_valid(line, essentials):
    text = message(line)
    for essential in essentials:
        assert essential in text, text


def test_options_may_be_spelt_with_underscores_but_values_stay():
    found = parse("--batch_size 32 --num_epochs=3 --kv_store=dist_sync --model_prefix a_b")
    assert (found.batch_size, found.num_epochs, found.kv_store, found.model_prefix) == (32, 3, "dist_sync", "a_b")


def test_refused_options_are_not_taken_and_say_what_to_do():
    assert not set(refused.REFUSED) & set(options.FLAGS)
    for name, row in refused.REFUSED.items():
        for spelling in (name, f"--{name[2:].replace('-', '_')}"):
            assert message(f"{spelling} 1") == f"{name}: {row.reason}; {row.instead}"


def test_pow_in_the_step_epochs_is_a_policy():
    found = parse("--lr-step-epochs pow2.5")
    assert (found.lr_policy, found.lr_power, found.lr_step_epochs) == ("pow", 2.5, ())


def test_help_shows_every_option(capsys):
    with pytest.raises(SystemExit) as caught:
        parse("--help")
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert all(flag in shown for flag in options.FLAGS)


def test_a_programs_default_of_top_k_needs_more_classes():
    def top_k(*words: str) -> int:
        return parse(" ".join(words), {"top_k": 5}).top_k

    assert top_k() == top_k("--num-classes", "6") == 5
    assert top_k("--num-classes", "5") == 0
    assert top_k("--num-classes", "3", "--top-k", "5") == 5  # refused when the data are known


@pytest.mark.parametrize("name", ["train_digits.py", pytest.param("score.py", marks=pytest.mark.thorough)])
def test_a_program_answers_for_each_command_line(tmp_path, name):
    lines = [["--lr", "0.25"], ["--lr", "fast"], ["--num-layers", "9", "--network", "resnet"], ["--help"], ["--not"]]
    (tmp_path / "lines.json").write_text(json.dumps(lines))
    command = [sys.executable, ROOT / "examples" / name]
    variables = env.inherited(DMLTRAIN_CHECK=str(tmp_path / "lines.json"), PYTHONPATH=search_path())
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=variables)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("DMLTRAIN_CHECK ") and done.stdout.count("\n") == 1
    good, *wrong = json.loads(done.stdout.removeprefix("DMLTRAIN_CHECK "))
    assert good["error"] is None and good["options"]["lr"] == 0.25 and good["distributed"] is False
    assert good["parameters"] > 1000
    expected = ("'fast' is not a number", "no resnet of 9 layers", "--help only prints", "unknown option --not")
    assert all(text in each["error"] for text, each in zip(expected, wrong, strict=True))
    assert [path.name for path in tmp_path.iterdir()] == ["lines.json"]


@pytest.mark.parametrize("content", ["{", "{}", "[1]", "[[1]]", "[" * 100_000])
def test_a_file_that_is_no_list_of_command_lines(tmp_path, content):
    file = tmp_path / "lines.json"
    file.write_text(content)
    with pytest.raises(UserError, match="JSON list of lists"):
        dry_parse.line(str(file), options.parse)


TEXT = """
--network --num-layers --gpus --kv-store --num-epochs --lr --lr-factor --lr-step-epochs --initializer --optimizer
--mom --wd --batch-size --disp-batches --model-prefix --save-period --monitor --load-epoch --top-k --loss --test-io
--dtype --gc-type --gc-threshold --macrobatch-size --warmup-epochs --warmup-strategy --profile-worker-suffix
--profile-server-suffix --use-imagenet-data-augmentation --data-train --data-train-idx --data-val --data-val-idx
--rgb-mean --rgb-std --pad-size --fill-value --image-shape --num-classes --num-examples --data-nthreads --benchmark
--random-crop --random-mirror --max-random-h --max-random-s --max-random-l --min-random-aspect-ratio
--max-random-aspect-ratio --max-random-rotate-angle --max-random-shear-ratio --max-random-scale --min-random-scale
--max-random-area --min-random-area --min-crop-size --max-crop-size --brightness --contrast --saturation --pca-noise
--random-resized-crop --add_stn
"""
FIT_DATA_AND_MNIST = TEXT.split()  # of common/fit.py, common/data.py and train_mnist.py at v1.9.x


def test_all_64_options_of_mxnets_programs_are_taken_or_refused_with_a_remark():
    assert len(set(FIT_DATA_AND_MNIST)) == 64
    listed = [name for name, program, _ in mxnet.rows() if program in [*mxnet.PROGRAMS][:3]]
    assert sorted(listed) == sorted(name.replace("_", "-") for name in FIT_DATA_AND_MNIST)
    dashed = {name.replace("_", "-") for name in FIT_DATA_AND_MNIST}
    assert dashed <= {*options.FLAGS} | {*refused.REFUSED}
    assert set(mxnet.REMARKS) <= set(options.FLAGS)
    for name, _, text in mxnet.rows():
        assert len(text) > 5, name
    assert len([name for name, _, text in mxnet.rows() if text.startswith("refused: ")]) == 6


DEFAULTS = """
--kv-store device --num-epochs 100 --lr 0.1 --initializer default --optimizer sgd --mom 0.9 --wd 0.0001 --batch-size 128
--disp-batches 20 --save-period 1 --monitor 0 --top-k 0 --dtype float32 --gc-type none --macrobatch-size 0
--warmup-strategy linear
"""  # of fit.py, but for those that depend on the data set; train_imagenet.py and others have their own


def test_defaults_are_mxnets():
    assert options.parse(DEFAULTS.split()) == options.parse([])
