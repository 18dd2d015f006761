"""Arguments of benchmarks that cannot be: each is refused with what is valid, before anything is measured."""

import pytest

from tests.benchmarks.as_a_user import called

pytest.importorskip("torch", reason="benchmarks compare with torch")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("accuracy.py --log-dir none --gc-type none,zip", "--gc-type 'zip': choose one of none, bf16"),
        ("ddp.py --systems horovod", "choose of ddp, ddp-bf16"),
        ("ddp.py --networks mlp:25", "unknown network 'mlp:25'; expected such as mlp:25:100"),
        ("ddp.py --networks mlp:25:3", "an even number of tensors"),
        ("ddp.py --gpus a", "expected numbers of this machine's GPUs"),
        ("ddp.py --hosts 1", "--hosts must be 2 to 250"),
        ("ddp.py --slow-link 100mbit", "--slow-link and systems with servers on spare hosts need --hosts"),
        ("ddp.py --systems dmltrain-apart", "need --hosts"),
        ("ddp.py --batch 0", "at least 1"),
        ("ddp.py --pause -1", "0 to 60 seconds"),
        ("ddp.py --stragglers 0.1", "expected two numbers, such as 0.05:10"),
        ("ddp.py --stragglers 0.1:10", "a --pause above 0"),
        ("ddp.py --freeze 2:0", "up to 600 seconds between"),
        ("ddp.py --systems dmltrain-async,ddp", "so it cannot be it"),
        ("hosts.py --gc-type none,zip", "'zip': choose one of none, bf16"),
        ("hosts.py --systems horovod", "mxnet, dmltrain"),
        ("hosts.py --hosts 1", "2 to 250"),
        ("hosts.py --host-sum no", "choose one of auto, off"),
        ("hosts.py --megabytes 0", "more than 0"),
        ("inference.py --network densenet121", "inference.py: error: "),
        ("inference.py --network lenet --batch-size x", "inference.py: error: "),
        ("inference.py --network lenet --gpus 99", "inference.py: error: "),
        ("kvstore.py --systems horovod", "dmltrain, mxnet, gloo"),
        ("kvstore.py --repeats 0", "at least 1"),
        ("kvstore.py --x", "--x"),
        ("first_minutes.py --only sleep", "choose of machine, tests"),
        ("first_minutes.py --seconds 0", "more than 0"),
        ("networks.py --networks resnet-8:2:28 --gpus 0 --gpu-count 2", "as many as --gpu-count"),
        ("networks.py --networks resnet:32", "'resnet:32': expected NETWORK:BATCH:SIZE"),
        ("overlap.py --hosts 1", "2 to 250"),
        ("overlap.py --compute 0", "more than 0"),
        ("overlap.py --gc-type zip", "zip"),
        ("scale.py --keys 10,x", "'10,x'"),
        ("scale.py --workers 0", "above 0"),
        ("scale.py --megabytes nan", "above 0"),
        ("scale.py --repeats 0", "at least 1"),
        ("scale.py --transport udp", "udp"),
    ],
)
def test_a_mistake_is_explained(line, said):
    done = called(line)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr
