"""The fake CUDA device itself, and training on it: it ends with the CPU's weights, bit for bit. A race fails each of
these tests (plugin.py)."""

import ctypes
import faulthandler
import functools
import os
import re
import signal
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dmltrain import fit, score
from dmltrain.backends.torch import devices, loss_scale
from dmltrain.backends.torch.distributed import flat, layout
from dmltrain.backends.torch.distributed.buckets import Bucket, copy_to_host
from dmltrain.backends.torch.distributed.local_steps import OuterOptimizer
from dmltrain.backends.torch.gpu import codecs, pinned
from dmltrain.backends.torch.server_optimizer import SliceOptimizer
from dmltrain.kvstore import codec
from dmltrain.kvstore.local_steps import LocalSteps
from dmltrain.kvstore.worker import residual
from dmltrain.kvstore.worker.links.sharding import Slice
from dmltrain.kvstore.worker.links.undo import Undo
from dmltrain.kvstore.worker.links.worker_slice import WorkerSlice
from dmltrain.options import parse
from tests import image_records
from tests.backends.trainers import MLP, SMALL, batch, torch_trainer
from tests.connected import connected
from tests.device import fake_cuda
from tests.kvstore.whole_job import WholeJob

SIZE = 1000

# -- the device -------------------------------------------------------------------------------------------------------


def test_the_host_cannot_touch_memory_of_the_device():
    tensor = torch.ones(SIZE, device="cuda")
    pid = os.fork()
    if not pid:
        faulthandler.disable()
        ctypes.string_at(tensor.data_ptr(), 1)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGSEGV


def test_a_copy_to_the_host_is_there_when_the_host_has_waited():
    host = torch.zeros(SIZE, pin_memory=True)
    host.copy_(torch.ones(SIZE, device="cuda"), non_blocking=True)
    assert host.isnan().all()
    torch.cuda.synchronize()
    assert (host == 1).all()
    assert (torch.zeros(SIZE, pin_memory=True).copy_(torch.ones(SIZE, device="cuda")) == 1).all()


def change_the_source(wait):
    host = torch.zeros(SIZE, pin_memory=True)
    host.to("cuda", non_blocking=True)
    wait()
    host.fill_(1.0)


def read_on_another_stream(wait):
    tensor, stream = torch.zeros(SIZE, device="cuda"), torch.cuda.Stream()
    wait(stream)
    with torch.cuda.stream(stream):
        tensor.sum().item()


def write_what_another_stream_reads(wait):
    stream, tensor = torch.cuda.Stream(), torch.zeros(SIZE, device="cuda")
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        total = tensor.sum()
    wait(stream, torch.cuda.current_stream())
    tensor.add_(1.0)
    torch.cuda.synchronize()
    del total


def follow(stream, after=None):
    (after or stream).wait_stream(stream if after else torch.cuda.current_stream())


@pytest.mark.races
@pytest.mark.parametrize(
    "use, wait, says",
    [
        (change_the_source, torch.cuda.synchronize, "host memory was changed"),
        (read_on_another_stream, follow, "aten::sum uses device memory that"),
        (write_what_another_stream_reads, follow, "writes device memory that another stream still reads"),
    ],
)
def test_what_is_not_ordered_is_a_race(use, wait, says):
    use(wait)
    fake_cuda.check()
    use(lambda *_: None)
    assert says in "\n".join(fake_cuda.take_races())


def test_tensors_of_two_devices_are_told_apart():
    assert torch.ones(3, device="cuda:1").abs().ne(2).device.index == 1
    for other in ("cpu", "cuda:0"):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            torch.ones(3, device="cuda:1") + torch.ones(3, device=other)
    assert (torch.ones(3, device="cuda:1") + torch.ones(())).device.index == 1
    with pytest.raises(RuntimeError, match="Expected all tensors"):
        torch.ones(3, device="cuda:1") + torch.ones((), device="cuda:0")


# -- training ---------------------------------------------------------------------------------------------------------

STEPS = 3
LINES = {  # of jobs whose results do not depend on times: kvstore -> workers, options
    "dist_sync": (
        2,
        *(
            "",
            "--optimizer adam",
            "--update-on-kvstore 1 --optimizer adam",
            "--dtype bfloat16",
            "--dtype float16",
            "--factors auto --batch-size 16",
        ),
        *(f"--gc-type {name}" for name in codec.TYPES if name != "none"),
        "--gc-type bf16 --update-on-kvstore 1",
    ),
    "dist_async": (1, "", "--gc-type int8"),
    "dist_ssp": (1, "--staleness 1"),
    "dist_local": (2, "--local-steps 2", "--local-steps 2 --gc-type int8"),
}


def trained(store, line, network):
    made = torch_trainer(network, line, store)
    for step in range(STEPS):
        images, labels = batch(network, seed=STEPS * store.rank + step)
        made.train_step(images, labels, 16 * store.num_workers, 0.05)
    made.synchronize()
    assert made.device_memory() or "gpu" not in line
    return made.state()["model"] | residuals(store)


def residuals(store):
    return {name: torch.from_numpy(values) for name, values in store.residuals().items()}


def of_job(kind, workers, line, network=SMALL, **servers):
    return in_a_job(kind, workers, lambda store: trained(store, line, network), **servers)


def in_a_job(kind, workers, call, servers=1, far=0):
    """What `call(store)` returns for each worker. `far`: how many of the servers are on another host."""
    job = WholeJob(kind, workers=workers, servers=servers, far=far, make_step=SliceOptimizer)
    try:
        found = job.all(call)
        job.all(lambda store: store.close())
        assert not any(job.ended())
        return found
    finally:
        job.close()


def same(found, expected):
    return all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize(
    "kind, workers, line", [(kind, workers, line) for kind, (workers, *lines) in LINES.items() for line in lines]
)
def test_a_job_has_the_cpus_weights(kind, workers, line):
    network = MLP if "factors" in line else SMALL  # of which two layers send factors
    expected = of_job(kind, workers, line, network)
    found = of_job(kind, workers, f"{line} --gpus 0", network)
    assert all(same(*each) for each in zip(found, expected, strict=True))


@pytest.mark.parametrize("line", ["", "--gc-type int8"])
def test_workers_with_and_without_a_gpu_train_in_one_job(line):
    """As with --devices auto on two kinds of hosts."""
    expected = of_job("dist_sync", 2, line)
    found = in_a_job("dist_sync", 2, lambda store: trained(store, f"{line} {GPU * store.rank}", SMALL))
    assert all(same(*each) for each in zip(found, expected, strict=True))


@pytest.mark.parametrize("workers, servers, far, encodes", [(1, 1, 1, True), (2, 1, 1, False), (1, 2, 0, True)])
def test_what_another_host_gets_and_sends_is_coded_there_but_for_a_relay(workers, servers, far, encodes, monkeypatch):
    """A relay sums the gradients of its host's workers."""
    coded, line = {"encode": 0, "decode": 0}, "--gc-type 2bit"

    def counted(name, *words):
        coded[name] += 1
        return getattr(codecs, name)(*words)

    expected = of_job("dist_sync", workers, line, servers=servers, far=far)
    for name in coded:
        monkeypatch.setattr(pinned, name, functools.partial(counted, name))
    found = of_job("dist_sync", workers, f"{line} --gpus 0", servers=servers, far=far)
    assert all(same(*each) for each in zip(found, expected, strict=True))
    assert all(coded.values()) if encodes else not any(coded.values())


@pytest.mark.parametrize("kind", ["dist_sync", "dist_local --local-steps 1"])
def test_residuals_go_from_one_device_to_the_other(kind):
    """To a job on the CPU or a GPU, from one on the other: both go on alike."""
    kind, _, line = f"{kind} --gc-type int8".partition(" ")

    def began(store, device):
        made = torch_trainer(SMALL, f"{line} {device}", store)
        made.train_step(*batch(SMALL), 16, 0.05)
        made.settle()
        return made.state(store.residuals())

    def went_on(store, device, state):
        made = torch_trainer(SMALL, f"{line} {device}", store, state)
        assert same(residuals(store), state["residuals"])
        made.train_step(*batch(SMALL, seed=1), 16, 0.05)
        made.settle()
        return made.state()["model"] | residuals(store)

    (here,), (there,) = (in_a_job(kind, 1, lambda store, each=each: began(store, each)) for each in ("", GPU))
    assert same(there["residuals"], here["residuals"]) and any(each.any() for each in here["residuals"].values())
    found = [
        in_a_job(kind, 1, lambda store, each=each: went_on(store, *each))[0]
        for each in (("", here), (GPU, here), ("", there), (GPU, there))
    ]
    assert all(same(each, found[0]) for each in found)


def test_results_come_after_what_a_script_has_read_of_its_own_gradients():
    def one(store):
        model = torch.nn.Linear(8, 8).cuda()
        optimizer = connected(model, torch.optim.SGD(model.parameters(), 0.1), store, step_early=True)
        for use in (optimizer.step, optimizer.reduce_gradients):  # also after a step
            optimizer.zero_grad()
            model(torch.ones(4, 8, device="cuda")).sum().backward()
            norms = [parameter.grad.norm() for parameter in model.parameters()]
            use()
        return [float(norm) for norm in norms]

    (norms,) = in_a_job("dist_sync", 1, one)  # another worker's copies would order those of this one
    assert norms == pytest.approx([4 * 8, 4 * 8**0.5])


def test_a_scripts_gradients_with_compression_are_the_cpus():
    def means(store, device):
        torch.manual_seed(0)
        store.set_gradient_compression({"type": "int8"})
        model = torch.nn.Linear(8, 8).to(device)
        connected(model, torch.optim.SGD(model.parameters(), 0.1), store)
        model(torch.full((4, 8), 1.5, device=device)).square().sum().backward()
        return torch.cat([parameter.grad.flatten().cpu() for parameter in model.parameters()])

    here, there = (in_a_job("dist_sync", 1, lambda store, each=each: means(store, each)) for each in ("cpu", "cuda"))
    assert all(map(torch.equal, there, here)) and here[0].any()


def test_gradients_that_are_forgotten_while_they_are_copied_are_not_sent(monkeypatch):
    monkeypatch.setattr(pinned.PushedMemory, "is_complete", False)  # before somebody waits

    def stepped(store, forgotten):
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 8).cuda()
        optimizer = connected(model, torch.optim.SGD(model.parameters(), 0.1), store, step_early=True)
        for factor in (3.0, 1.0) if forgotten else (1.0,):
            optimizer._exchange.gradients.forget()
            optimizer.zero_grad()
            (factor * model(torch.ones(4, 8, device="cuda"))).sum().backward()
        optimizer.step()
        return model.weight.detach().cpu()

    for found, expected in in_a_job("dist_sync", 2, lambda store: (stepped(store, True), stepped(store, False))):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("line", ["", "--dtype float16", "--gc-type 2bit", "--update-on-kvstore 1", "--sync-bn 1"])
def test_two_devices_have_the_weights_of_two_replicas_on_the_cpu(line, monkeypatch):
    """Also if it takes several copies from one to the other."""
    monkeypatch.setattr(flat, "CHUNK", 1 << 10)
    found, expected = (of_job("dist_sync", 1, f"{line} --devices {devices}") for devices in ("gpu:2", "cpu:2"))
    assert all(same(*each) for each in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    "line, says",
    [
        ("", "TF32 off for products and on for convolutions, deterministic off"),
        ("--tf32 1", "TF32 on for products and on for convolutions, deterministic off"),
        ("--deterministic 1", "TF32 off for products and off for convolutions, deterministic on"),
        ("--replay views.json --tf32 1", "TF32 on for products and on for convolutions, deterministic on"),
    ],
)
def test_the_log_says_how_gpus_compute(line, says):
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = True, False  # torch's defaults
    made = torch_trainer(MLP, f"--gpus 0 {line}")
    assert made.choices()[0] == f"GPU arithmetic: {says}" and torch_trainer(MLP, line).choices() == []
    found = torch.backends.cudnn.deterministic, torch.are_deterministic_algorithms_enabled()
    torch_trainer(MLP, "--gpus 0")
    assert found == ("deterministic on" in says,) * 2 and not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("line", ["--tf32 1", "--deterministic 1"])
def test_intels_gpus_compute_as_onednn_is_told(line, monkeypatch):
    monkeypatch.setattr(torch.backends, "mkldnn", SimpleNamespace(allow_tf32=None))
    before, tf32 = torch.backends.cudnn.allow_tf32, line == "--tf32 1"
    says = devices.set_arithmetic([torch.device("xpu:0")], parse(line.split()))
    assert ("TF32 on for products and on for" in says) == tf32 and torch.backends.mkldnn.allow_tf32 == tf32
    assert torch.backends.cudnn.allow_tf32 == before
    torch_trainer(MLP, "--gpus 0")


def test_a_gpu_that_another_process_uses_too_is_a_warning():
    torch_trainer(MLP, "--gpus 1")
    ours, theirs = os.pipe()
    if not os.fork():
        devices._claims.clear()  # as in a process of its own, whose parent has the sockets still
        os.write(theirs, "\n".join(torch_trainer(MLP, "--gpus 1").choices()).encode())
        os._exit(0)
    os.wait()
    assert "Warning: cuda:1 is also used by another process of dmltrain" in os.read(ours, 10_000).decode()


def test_a_loss_scale_looks_at_all_gradients_at_once():
    """And at no gradient of a device by itself."""
    made = torch_trainer(SMALL, "--gpus 0 --dtype float16")
    made.train_step(*batch(SMALL), 16, 0.05)
    gradients = [parameter.grad for parameter in made.replicas.modules[0].parameters()]
    counts = []
    for some in (gradients[:2], gradients):
        before = fake_cuda.counted("kernels")
        assert not loss_scale._overflowed(some)
        counts.append(fake_cuda.counted("kernels") - before)
    assert counts[0] == counts[1] and len(gradients) > 2
    gradients[-1].view(-1)[0] = torch.inf
    assert loss_scale._overflowed(gradients)


# -- rounds of an elastic job that are aborted -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bf16", "int8", "topk"])
def test_what_an_aborted_round_has_encoded_is_taken_back_on_the_gpu_too(name):
    """The host encodes the slice `here`, the GPU that of the bucket, `there`."""
    op, kind, chance = 0, codec.make({"type": name}), torch.Generator().manual_seed(0)
    here, there = (WorkerSlice(Slice(0, 0, 0, SIZE, 0), np.dtype(np.float32), kind, None) for _ in range(2))
    for each in (here, there):
        each.undo = each.residual and Undo(each.residual)
    bucket = Bucket("b", 0, 0, [torch.nn.Parameter(torch.zeros(SIZE, device="cuda"))])
    bucket.lay_out(np.empty(0, np.float32), True, [there.encoding(None, lambda: op)])

    def push(*factors):
        gradients, expected = bucket.gradients.cpu().numpy(), np.empty(kind.nbytes(SIZE), np.uint8)
        for factor in factors:
            gradients = gradients * np.float32(factor)
        here.encode(gradients, expected, op)
        assert np.array_equal(bucket.host_gradients(factors).parts[0], expected)

    def back_to(base):
        for each in (here, there) if here.undo else ():
            each.undo.back_to(base)
        assert not here.residual or np.array_equal(there.residual.read(), here.residual.read())

    for op in range(1, 6):
        bucket.begin()
        bucket.gradients.copy_(torch.randn(SIZE, generator=chance))
        if op > 1:
            copy_to_host([bucket])
        if op == 3:
            push()
        if op % 2:  # aborted, whether it was pushed or not
            back_to(op - 1)
        push(*((1.5, 1 / 3) if op in (3, 4) else ()))  # in 4 it was encoded before that was known
        back_to(op)
    for change in (lambda: residual.add([there], np.ones(SIZE, np.float32)), lambda: there.undo.forget()):
        copy_to_host([bucket])  # nothing waits for it before the residual is changed
        if there.residual:
            change()
    bucket.host.complete()
    assert not there.residual or not there.residual.read().any()


def test_an_average_that_is_begun_again_waits_for_copies_of_the_first_attempt():
    """Else it is a race."""
    model = torch.nn.Linear(SIZE, 2).cuda()
    (bucket,) = layout.make_buckets(model, torch.optim.SGD(model.parameters(), 0.1), "b")
    bucket.lay_out(bucket.weights.on_host())
    outer = OuterOptimizer([bucket], LocalSteps(1, 1.0, 0.0))
    outer.begin()
    with torch.no_grad():
        for _ in range(2):
            outer.compute_parts()
            copy_to_host([bucket])
    bucket.host.complete()


# -- programs ---------------------------------------------------------------------------------------------------------

DIGITS = "--dataset digits --network mlp --kv-store local --batch-size 32"
IMAGES = "--dataset imagenet --num-classes 4 --image-shape 3,16,16 --network mlp --kv-store local --batch-size 8"
GPU = "--gpus 0"


@pytest.fixture
def run(capfd):
    def run_here(*words, program=fit):
        code = program.main(" ".join(map(str, words)).split(), prog="program")
        text = capfd.readouterr().err
        assert code == 0, text
        return re.findall(r"(?:Validation-\S+|Train-\S+|weights sha256)=\S+", text)

    return run_here


def test_checkpoints_go_from_one_device_to_the_other(run, tmp_path):
    words = f"{DIGITS} --optimizer adam --num-examples 320 --num-epochs 2 --model-prefix"
    here = run(words, tmp_path / "cpu")
    assert len(here) == 9 and run(words, tmp_path / "gpu", GPU) == here
    for prefix, device in (("gpu", ""), ("cpu", GPU)):
        assert run(words, tmp_path / prefix, "--load-epoch 1", device) == here[4:]
    checked = [f"--model-prefix {tmp_path}/gpu {DIGITS} {device}" for device in ("", GPU)]
    assert run(checked[0], program=score) == run(checked[1], program=score)


@pytest.mark.parametrize("rank, number", [("0", 0), ("1", 1), ("2", 0)])
def test_auto_is_the_gpu_of_this_workers_number_on_its_host(rank, number, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", rank)
    assert parse(["--devices", "auto"]).found().device_names == (f"gpu:{number}",)


def test_images_that_are_changed_at_random(run, tmp_path):
    path = image_records.write(tmp_path / "train.rec", range(40))
    words = f"{IMAGES} --data-train {path} --data-val {path} --rgb-mean 127 --rgb-std 60 --aug-level 3 --num-epochs 2"
    assert run(words) == run(words, GPU)
