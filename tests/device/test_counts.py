"""What a step asks of a GPU, for each kvstore and codec: copies, bytes, waits, and kernels beside those of the network
and the optimizer. Nothing more may come back."""

from types import SimpleNamespace

import pytest
import torch

from dmltrain import kvstore
from dmltrain.backends.torch.distributed import layout
from dmltrain.backends.torch.distributed.gradients import leaving
from dmltrain.backends.torch.gpu import pinned, registered
from dmltrain.kvstore import codec
from dmltrain.kvstore.encoded import Encoded
from dmltrain.options import parse
from tests.backends.trainers import RESNET, batch, torch_trainer
from tests.connected import connected
from tests.device import fake_cuda
from tests.device.test_on_it import in_a_job, of_job, same

COPIES = [f"{what} to the {place}" for place in ("host", "device") for what in ("copies", "blocking copies", "bytes")]
COUNTED = ("kernels", "synchronisations", *COPIES, "copies on other streams")
HELD = "bytes held between backward and step"
OF_SAMPLES = 2  # images and labels: copies, and waits for copies of batches long ago
BUCKETS, SEVERAL = 11, 5  # of so few bytes; those of several parameters, whose gradients a kernel gathers
LAYERS, LAYER = 6, 64 * 65  # of a script's model, and the elements of each, which are a bucket
TOGETHER = 1 << 17  # bytes of gradients that are encoded together, which makes three encodings of a step
ENCODING = {"none": 0, "bf16": 3 * 7, "fp16": 3 * 10, "int8": 3 * 29, "2bit": 3 * 84 + 2, "topk": 3 * 6 + 20 * BUCKETS}
DECODING = {"none": 0, "bf16": 3, "fp16": 5, "int8": 5, "2bit": 12, "topk": 2}  # once; topk 2 more for each bucket
KERNELS = {  # kvstore, options -> kernels beside those of training alone; servers step in place of the two of SGD
    **{("dist_sync", f"--gc-type {name}"): SEVERAL + kernels for name, kernels in ENCODING.items()},
    ("dist_sync", "--update-on-kvstore 1"): SEVERAL - 2,
    ("dist_async", ""): SEVERAL - 2,
    ("dist_async", "--gc-type int8"): SEVERAL - 2 + ENCODING["int8"],
    ("dist_ssp", "--staleness 1"): SEVERAL - 2,
    ("dist_local", "--local-steps 1"): 5,  # start, its copy, difference, step, weights
    ("dist_local", "--local-steps 1 --gc-type bf16"): 5 + ENCODING["bf16"],
}


def of_a_step(store, line, decoded, network=RESNET, count=16):
    """The counts, and how many buckets were sent before backward ended, how many copies had begun when the first one
    was, the elements of each, and whether all lie in the servers' sight. `decoded`: see below."""
    memory = [fake_cuda.counted("device bytes")]
    made, sent, begun = torch_trainer(network, f"--gpus 0 {line}", store), [], []
    gradients = made._optimizer._exchange.gradients
    push, pushpull = gradients.push, store.pushpull

    def noted_push():
        sent.append(sum(bucket.pushed and bucket not in gradients.leaving for bucket in gradients.buckets))
        push()

    def noted_pushpull(*arguments, **named):
        begun.append(fake_cuda.counted("copies to the host"))
        return pushpull(*arguments, **named)

    def noted_step():
        memory.append(fake_cuda.counted("device bytes"))
        step()

    gradients.push, store.pushpull = noted_push, noted_pushpull
    step, made._optimizer.step = made._optimizer.step, noted_step
    images, labels = batch(network, count)
    for _ in range(4):  # the first ones get the buffers of samples
        made.settle()
        begun.clear()
        decoded.clear()
        before = [fake_cuda.counted(what) for what in COUNTED]
        made.train_step(images, labels, len(labels), 0.05)
        made.settle()
    after = [fake_cuda.counted(what) for what in COUNTED]
    found = {what: now - then for what, then, now in zip(COUNTED, before, after, strict=True)}
    found[HELD] = memory[-1] - memory[0]
    first = begun[0] - before[COUNTED.index("copies to the host")] if begun else 0
    return (
        found,
        sent[-1] if sent else 0,
        first,
        [bucket.elements for bucket in gradients.buckets],
        all(store.shares(part) for bucket in gradients.buckets for part in _parts(bucket.host.complete())),
    )


@pytest.fixture
def decoded(monkeypatch):
    """How many results the GPU has decoded together each time."""
    decode, found = pinned.decode, []
    monkeypatch.setattr(pinned, "decode", lambda *words: found.append(len(words[1])) or decode(*words))
    return found


def _parts(pushed):
    return pushed.parts if isinstance(pushed, Encoded) else [pushed]


@pytest.fixture(scope="module")
def alone():
    found, *_ = of_a_step(kvstore.create("local"), "", [])
    assert all(found[what] == OF_SAMPLES for what in ("copies to the device", "synchronisations", COUNTED[-1]))
    assert not any(found[what] for what in ("copies to the host", "blocking copies to the device"))
    return found


@pytest.mark.parametrize("kind, line", KERNELS)
def test_a_step_copies_each_gradient_once_and_computes_little_else(kind, line, alone, decoded, monkeypatch):
    monkeypatch.setattr(layout, "BUCKET_BYTES", 1 << 14)
    monkeypatch.setattr(leaving, "TOGETHER", TOGETHER if "gc-type" in line and "none" not in line else 1 << 30)
    ((found, sent, begun, sizes, is_shared),) = in_a_job(kind, 1, lambda store: of_a_step(store, line, decoded))
    name = parse(["--kv-store", kind, *line.split()]).gc_type
    encoded = codec.make({"type": name})
    in_bytes = sum(encoded.nbytes(size) if encoded else 4 * size for size in sizes)
    sums = name != "none" and kind != "dist_async"  # the weights of servers are sent as they are
    assert sum(decoded) == BUCKETS * sums, "each result once"
    kernels = DECODING[name] * len(decoded) + 2 * BUCKETS * (name == "topk")  # however many arrive together
    assert {what: found[what] - alone[what] for what in COUNTED} == {
        "kernels": KERNELS[kind, line] + kernels,
        "synchronisations": BUCKETS,  # each is the end of a copy, before the push
        "copies to the host": BUCKETS,
        "blocking copies to the host": 0,
        "bytes to the host": in_bytes,
        "copies to the device": BUCKETS,
        "blocking copies to the device": 0,
        "bytes to the device": in_bytes if sums else 4 * RESNET.num_parameters,
        "copies on other streams": 2 * BUCKETS,
    }
    assert is_shared, "the GPU copies to where servers read"
    assert begun == BUCKETS if kind == "dist_local" else 0 < sent < BUCKETS, "one goes on while others are sent"


def test_two_gpus_exchange_gradients_and_weights_with_one_copy_each_and_push_once(monkeypatch):
    def counts(store):
        found, *_ = of_a_step(store, "--gpus 0,1", [])
        replicas = torch_trainer(RESNET, "--gpus 0,1").replicas
        for module in replicas.modules:
            for parameter in module.parameters():
                parameter.grad = torch.ones_like(parameter)
        kernels = []
        for call in (replicas.sum_gradients, replicas.copy_weights):
            before = fake_cuda.counted("kernels")
            call()
            kernels.append(fake_cuda.counted("kernels") - before)
        return found, kernels

    monkeypatch.setattr(layout, "BUCKET_BYTES", 1 << 14)
    ((found, kernels),) = in_a_job("dist_sync", 1, counts)
    assert kernels == [3, 3]  # gathered, copied, and added or set
    assert found["copies to the host"] == BUCKETS and found["bytes to the host"] == 4 * RESNET.num_parameters
    assert (
        found["blocking copies to the host"] == 0 and found["copies on other streams"] == 2 * BUCKETS + 2 * OF_SAMPLES
    )


def of_a_script(store, compression, decoded):
    """What the store adds to a script's backward; and how many buckets were sent before each end of it."""
    torch.manual_seed(0)
    if compression != "none":
        store.set_gradient_compression({"type": compression})
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(LAYERS))).cuda()
    optimizer, sent = torch.optim.SGD(model.parameters(), 0.1), []

    def backward():
        optimizer.zero_grad()
        loss = model(torch.ones(4, 64, device="cuda")).sum()
        before = [fake_cuda.counted(what) for what in COUNTED]
        decoded.clear()
        loss.backward()
        return [fake_cuda.counted(what) - then for what, then in zip(COUNTED, before, strict=True)]

    alone = backward()
    (reducer,) = connected(model, optimizer, store)._exchange.gradients._reducers
    exchange_all = reducer._exchange_all
    reducer._exchange_all = lambda at_step: sent.append(len(reducer._sent.handles)) or exchange_all(at_step)
    both = [backward(), backward()][1]
    return {what: now - then for what, then, now in zip(COUNTED, alone, both, strict=True)}, sent


@pytest.mark.parametrize("compression", ["none", "int8"])
def test_a_scripts_backward_waits_for_no_copy_before_its_end(compression, decoded, monkeypatch):
    monkeypatch.setattr(layout, "BUCKET_BYTES", 4 * LAYER)
    monkeypatch.setattr(leaving, "TOGETHER", 1 << 30 if compression == "none" else 4 * LAYER)
    ((found, sent),) = in_a_job("dist_sync", 1, lambda store: of_a_script(store, compression, decoded))
    encoded = codec.make({"type": compression})
    kernels = found.pop("kernels") - LAYERS - LAYERS * ENCODING[compression] // 3
    kernels -= DECODING[compression] * len(decoded)
    in_bytes = LAYERS * (encoded.nbytes(LAYER) if encoded else 4 * LAYER)
    assert kernels in (1, 2)  # for results that are there at the end of backward, and for all others
    assert found == {
        "synchronisations": LAYERS,
        "copies to the host": LAYERS,
        "blocking copies to the host": 0,
        "bytes to the host": in_bytes,
        "copies to the device": LAYERS,
        "blocking copies to the device": 0,
        "bytes to the device": in_bytes,
        "copies on other streams": 2 * LAYERS,
    }
    assert all(0 < count < LAYERS - 1 for count in sent), "the copy before the last one is not waited for, either"


# -- memory that is registered with the driver ------------------------------------------------------------------------


@pytest.mark.parametrize("answer", [1, RuntimeError("not supported")])
def test_without_registered_memory_the_weights_are_the_same(answer, monkeypatch):
    def refuse(*_):
        if isinstance(answer, int):
            return fake_cuda.fail(answer)
        raise answer

    expected = of_job("dist_sync", 2, "")
    driver = SimpleNamespace(cudaHostRegister=refuse, cudaHostUnregister=refuse)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    assert all(same(*each) for each in zip(of_job("dist_sync", 2, "--gpus 0"), expected, strict=True))


@pytest.mark.parametrize(
    "ranges, known, found",
    [
        ([(5000, 5100), (100, 200)], [], [(0, 8192)]),
        ([(100, 4096), (8192, 8193)], [], [(0, 4096), (8192, 12288)]),
        ([(0, 0)], [], []),
        ([(0, 40960)], [(4096, 8192), (16384, 20480)], [(0, 4096), (8192, 16384), (20480, 40960)]),
        ([(4096, 8192)], [(0, 40960)], []),
    ],
)
def test_whole_pages_are_registered_once(ranges, known, found):
    assert [part for each in registered.pages(ranges) for part in registered.missing(each, known)] == found
