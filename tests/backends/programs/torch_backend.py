"""A worker with the backend "dmltrain" of torch.distributed: python torch_backend.py FUNCTION FILE [WORD ...]"""

import datetime
import gc
import json
import os
import signal
import sys

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional_collectives
from torch.distributed import distributed_c10d

import dmltrain.torch  # a server's process ends here
from dmltrain.backends.torch import process_group
from dmltrain.base import env

LARGE = 40_000  # elements: some pieces, of which the last has room
# As between hosts, so that these take servers over TCP.
process_group.sums.LEAST_WITHIN = process_group.sums.LEAST_BETWEEN
DEVICE = os.environ.get("TEST_DEVICE", "cpu")  # of the tensors that go over dmltrain
OPERATIONS = ("SUM", "AVG", "MIN", "MAX", "PRODUCT", "BAND", "BOR", "BXOR")


def say(**values):
    print(json.dumps(values), flush=True)


def sent():
    (job,) = [each for each in gc.get_objects() if isinstance(each, process_group.Job)]
    return job.sums.store.bytes_sent if job.sums else 0


def random(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, device="cpu").to(torch.get_default_device(), dtype)
    return torch.randint(0, 5, shape, generator=generator, device="cpu").to(torch.get_default_device(), dtype)


def all_reduces():
    """Each operation, type and size equals gloo's; of the means gloo has none."""
    gloo, wrong = dist.new_group(backend="gloo"), []
    for name in OPERATIONS:
        dtypes = (torch.int32, torch.uint8) if name.startswith("B") else (torch.float32, torch.float64, torch.bfloat16)
        for dtype in (*dtypes, torch.int64):
            for size in (1, 1000, LARGE):
                right = random(size, dtype=dtype, seed=size)
                own = right.clone().to(DEVICE)
                dist.all_reduce(own, getattr(dist.ReduceOp, name))
                dist.all_reduce(right, getattr(dist.ReduceOp, "SUM" if name == "AVG" else name), group=gloo)
                if name == "AVG":
                    right = right.div(dist.get_world_size(), rounding_mode=None if dtype.is_floating_point else "trunc")
                near = 5e-2 if dtype == torch.bfloat16 else 1e-5  # sums of three have other orders
                if not torch.allclose(own.cpu().double(), right.double(), rtol=near, atol=near):
                    wrong.append([name, str(dtype), size])
    return wrong


def sums_of_16_bits():
    """In shared memory they are rounded once; gloo rounds after each worker."""
    wrong, sums = [], dist.group.WORLD.sums
    for dtype in (torch.bfloat16, torch.float16) if sums and sums.host else ():
        before, own = dmltrain.torch.bytes_summed(), random(LARGE, dtype=dtype)
        dist.all_gather(parts := [torch.empty_like(own) for _ in range(dist.get_world_size())], own)
        dist.all_reduce(own)
        if not torch.equal(own, sum(part.float() for part in parts).to(dtype)):
            wrong.append(["rounded more than once", str(dtype)])
        assert dmltrain.torch.bytes_summed() - before == own.nbytes
    return wrong


def collectives():
    """Each collective gives what it gives in a group of gloo."""
    rank, size, wrong = dist.get_rank(), dist.get_world_size(), [*all_reduces(), *sums_of_16_bits()]
    gloo = dist.new_group(backend="gloo")

    def same(name, make):
        """`make(group)` -> tensors."""
        with torch.device(DEVICE):
            own = make(None)
        if not all(torch.equal(one.cpu(), two) for one, two in zip(own, make(gloo), strict=True)):
            wrong.append(name)

    def empty(count=size):
        return [torch.empty(LARGE) for _ in range(count)]

    def broadcast(group):
        dist.broadcast(tensor := random(LARGE), 1, group)
        return [tensor]

    def reduce(group):
        dist.reduce(tensor := random(LARGE), 0, group=group)
        return [tensor] if rank == 0 else []

    def all_gather(group):
        dist.all_gather(tensors := empty(), random(LARGE), group)
        return tensors

    def into_tensor(group):
        dist.all_gather_into_tensor(tensor := torch.empty(size * LARGE), random(LARGE), group)
        return [tensor]

    def gather(group):
        dist.gather(random(LARGE), tensors := empty() if rank == 0 else None, 0, group)
        return tensors or []

    def scatter(group):
        dist.scatter(
            tensor := torch.empty(LARGE), [random(LARGE, seed=i) for i in range(size)] if rank == 1 else None, 1, group
        )
        return [tensor]

    def reduce_scatter(group):
        parts = [random(LARGE, seed=i).round() for i in range(size)]  # sums of three have other orders
        dist.reduce_scatter(tensor := torch.empty(LARGE), parts, group=group)
        return [tensor]

    def scattered_tensor(group):
        before, sums = dmltrain.torch.bytes_summed(), dist.group.WORLD.sums
        dist.reduce_scatter_tensor(tensor := torch.empty(LARGE), random(size * LARGE).round(), group=group)
        summed = 4 * size * LARGE if group is None and sums and sums.host else 0
        assert dmltrain.torch.bytes_summed() - before == summed
        return [tensor]

    def all_to_all(group):
        dist.all_to_all(tensors := empty(), [random(LARGE, seed=i) for i in range(size)], group)
        return tensors

    def single(group):
        dist.all_to_all_single(tensor := torch.empty(size * LARGE), random(size * LARGE), group=group)
        return [tensor]

    def uneven(group):
        own = random(10 * (rank + 1))
        if group:  # gloo does not have it
            dist.all_gather_object(found := [None] * size, own)
            return found
        dist.all_gather(tensors := [torch.empty(10 * (i + 1)) for i in range(size)], own)
        return tensors

    def objects(group):
        dist.all_gather_object(found := [None] * size, {"rank": rank, "words": "x" * rank}, group)
        return [torch.tensor([each["rank"], len(each["words"])]) for each in found]

    def coalesced(group):
        with dist._coalescing_manager(group, async_ops=False):
            for tensor in (tensors := [random(LARGE, seed=i).round() for i in range(3)]):
                dist.all_reduce(tensor, group=group)
        return tensors

    def functional(group):
        group = group or dist.group.WORLD
        gathered = functional_collectives.all_gather_tensor(random(LARGE), 0, group)
        return [gathered, functional_collectives.all_reduce(random(LARGE).round(), "sum", group)]

    def with_gaps(group):
        """Tensors that do not lie densely, and of other types."""
        tensor, types = random(100, 40).t(), [torch.bool, torch.bfloat16, torch.int64]
        types += [torch.complex64] if DEVICE == "cpu" else []  # a device that is none has no views of these
        dist.broadcast(tensor, 1, group)
        tensors = [random(10).to(each) for each in types]
        for each in tensors:
            dist.broadcast(each, 0, group)
        dist.all_gather(found := [torch.empty(2, 3).t() for _ in range(size)], random(3, 2), group)
        return [tensor, *tensors, *found]

    def points(group):
        tensor = random(LARGE)
        if rank == 0:
            dist.send(tensor, 1, group)
        elif rank == 1:
            dist.recv(tensor, 0, group)
        return [tensor]

    for make in (
        *(broadcast, reduce, all_gather, into_tensor, gather, scatter, reduce_scatter, scattered_tensor, all_to_all),
        *(single, uneven, objects, coalesced, functional, with_gaps, points),
    ):
        same(make.__name__, make)
    dist.barrier(device_ids=[0])
    say(wrong=wrong)


def works():
    """Many sums under way at once, more than the ring has places, and what their works and futures say."""
    rank, size = dist.get_rank(), dist.get_world_size()
    tensors = [torch.full((20_000,), float(rank + number)) for number in range(100)]
    all_works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    futures = [work.get_future() for work in all_works[::2]]
    for work in all_works[1::2]:
        work.wait()
    torch.futures.wait_all(futures)
    ranks = size * (size - 1) // 2
    right = all((tensor == size * number + ranks).all() for number, tensor in enumerate(tensors))
    work = all_works[0]
    say(right=bool(right), complete=work.is_completed() and work.is_success() and work.exception() is None)
    say(result=float(work.result()[0][0]), future=float(futures[0].value()[0][0]))


def groups():
    """Groups of fewer workers, several at once, and a new default group after the first was destroyed."""
    rank, size = dist.get_rank(), dist.get_world_size()
    few = dist.new_group([0, 1])
    tensor, world = torch.full((LARGE,), float(rank)), torch.full((LARGE,), 1.0)
    works = [dist.all_reduce(world, async_op=True)]
    if rank < 2:
        works.append(dist.all_reduce(tensor, group=few, async_op=True))
    for work in works:
        work.wait()
    say(few=float(tensor[0]), world=float(world[0]), name=dist.get_backend())
    dist.barrier()
    dist.destroy_process_group()
    begin(sys.argv[2] + ".second")
    dist.all_reduce(again := torch.full((LARGE,), 1.0))
    say(again=float(again[0]), size=size)


def ddp():
    """DistributedDataParallel over dmltrain, and over gloo, from the same first weights."""
    results = []
    for name in ("dmltrain", "gloo"):
        before = dmltrain.torch.bytes_summed()
        torch.manual_seed(dist.get_rank())
        layers = [torch.nn.Linear(300, 300), torch.nn.BatchNorm1d(300), torch.nn.ReLU()]
        model = torch.nn.Sequential(*layers, torch.nn.Linear(300, 300), torch.nn.Linear(300, 2))
        model.to(device := DEVICE if name == "dmltrain" else "cpu")
        group = None if name == "dmltrain" else dist.new_group(backend="gloo")
        wrapped = torch.nn.parallel.DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.3)
        optimizer = torch.optim.SGD(wrapped.parameters(), 0.1, momentum=0.9)
        for step in range(4):
            optimizer.zero_grad()
            with wrapped.no_sync() if step == 1 else torch.enable_grad():
                wrapped(random(16, 300, seed=step).to(device)).square().mean().backward()
            optimizer.step()
        results.append(model.state_dict())
        if name == "dmltrain":
            say(sent=dmltrain.torch.bytes_summed() - before)
    say(
        same=all(torch.equal(one.cpu(), two) for one, two in zip(results[0].values(), results[1].values(), strict=True))
    )


def fault(kind):
    """Worker 1 does something else than the others."""
    rank = dist.get_rank()
    dist.all_reduce(tensor := torch.zeros(LARGE))
    if kind == "another collective":
        dist.broadcast(torch.zeros(7), 0) if rank == 1 else dist.all_reduce(tensor)
    elif kind == "another reduction":
        dist.all_reduce(tensor, dist.ReduceOp.MAX if rank == 1 else dist.ReduceOp.SUM)
    elif kind == "another size":
        dist.all_reduce(torch.zeros(3 * LARGE if rank == 1 else LARGE))
    elif kind == "another size in the same pieces":
        dist.all_reduce(torch.zeros(LARGE - rank))
    elif kind == "another size over gloo":
        dist.all_reduce(torch.zeros(10 + rank))
    elif kind == "aborted":
        distributed_c10d._abort_process_group() if rank == 1 else dist.all_reduce(tensor)
    elif kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else dist.barrier()
    elif kind == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP) if rank == 1 else dist.barrier()
    elif kind == "stopped before a sum":
        os.kill(os.getpid(), signal.SIGSTOP) if rank == 1 else dist.all_reduce(tensor)
    elif kind == "late":
        dist.destroy_process_group()
        begin(sys.argv[2] + ".second", timeout=datetime.timedelta(seconds=7))
        signal.pause() if rank == 1 else dist.all_reduce(tensor)


def unused(_):
    """No sum goes over the servers."""
    dist.all_reduce(torch.zeros(7))


def begin(file, shift=0, backend="dmltrain", **more):
    environment = env.read()
    size, rank = environment.num_workers, environment.index
    rank = (rank + shift) % size
    if DEVICE != "cpu":
        more["device_id"] = torch.device(DEVICE, 0)
    dist.init_process_group(backend, init_method=f"file://{file}", world_size=size, rank=rank, **more)


if __name__ == "__main__":
    function, file, *words = sys.argv[1:]
    dist.set_debug_level_from_env()  # which torch reads when it is imported, before this process was forked
    if function == "contradicts":
        begin(file, shift=1)
    begin(file, backend="gloo" if words == ["over gloo"] else "dmltrain")
    globals()[function](*words)
    dist.destroy_process_group()
