"""Every option of MXNet's programs is taken, or refused with the reason and what to use instead."""

from dmltrain import options
from dmltrain.options import mxnet, refused

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


def test_all_64_are_known():
    assert len(set(FIT_DATA_AND_MNIST)) == 64
    listed = [name for name, program, _ in mxnet.rows() if program in [*mxnet.PROGRAMS][:3]]
    assert sorted(listed) == sorted(name.replace("_", "-") for name in FIT_DATA_AND_MNIST)


def test_an_option_is_taken_or_refused():
    """test_options.py has the reasons of those that are refused."""
    dashed = {name.replace("_", "-") for name in FIT_DATA_AND_MNIST}
    assert dashed <= {*options.FLAGS} | {*refused.REFUSED}


def test_remarks_are_about_options_that_exist():
    assert set(mxnet.REMARKS) <= set(options.FLAGS)


def test_every_row_says_something():
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
