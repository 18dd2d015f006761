"""A worker of torch.distributed on a host of a test bed: python torch_hosts.py FUNCTION FOLDER [WORD ...]"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import dmltrain.torch  # a server's process ends here
from dmltrain.kvstore.scheduler.job_end import JobEnd
from dmltrain.torch import hooks
from tests.waiting import wait_for

VICTIM = 2
ELEMENTS = 2_000_000  # 8 MB
WIDTH = 300  # of a layer, whose gradients go over the servers
found: dict[str, object] = {}
_lock = threading.Lock()


def say(name: str, value: object) -> None:
    """Into this worker's file, at once: it may be ended soon."""
    with _lock:
        found[name] = value
        new = folder / f"new-{rank}"
        new.write_text(json.dumps(found))
        new.rename(folder / f"worker-{rank}.json")


def sent() -> dict[str, int]:
    """Bytes that this host has sent, by interface."""
    rows = [row.split(":") for row in Path("/proc/net/dev").read_text().splitlines()[2:]]
    return {name.strip(): int(numbers.split()[8]) for name, numbers in rows}


def travelled(do: Callable[[], None]) -> dict[str, int]:
    """Bytes that this host has sent for it."""
    dist.barrier()
    before = sent()
    do()
    dist.barrier()
    return {name: number - before[name] for name, number in sent().items()}


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(WIDTH, WIDTH))


def backward(of: torch.nn.Module) -> torch.Tensor:
    of.zero_grad()
    of(torch.full((4, WIDTH), float(rank + 1))).sum().backward()
    return next(of.parameters()).grad


def bytes_() -> None:
    """A sum of 8 MB, and gradients of two models, as they are and with a hook."""
    tensor = torch.full((ELEMENTS,), float(rank + 1))
    dist.all_reduce(torch.ones(ELEMENTS))  # declares keys
    say("sum", travelled(lambda: dist.all_reduce(tensor)))
    say("right", bool((tensor == size * (size + 1) / 2).all()))
    plain, coded = model(), model()
    coded.register_comm_hook(hooks.State(), hooks.int8)
    for _ in range(2):  # buckets as they are, and the declaration of keys
        backward(plain), backward(coded)
    for name, each in (("plain", plain), ("int8", coded)):
        say(name, travelled(lambda each=each: backward(each)))
        say(f"{name} is right", float((next(each.parameters()).grad / (2 * size + 2) - 1).abs().max()))
    say("summed", dmltrain.torch.bytes_summed())


def calls(group: dist.ProcessGroup) -> dict[str, Callable[[], object]]:
    """What waits for the victim, by its name. `group`: of all workers."""
    small, large, each = torch.zeros(10), torch.zeros(1 << 24), [torch.zeros(10) for _ in range(size)]
    return {
        "barrier": lambda: dist.barrier(group),
        "all_gather": lambda: dist.all_gather(each, small, group),
        "broadcast": lambda: dist.broadcast(small, VICTIM, group),
        "all_to_all": lambda: dist.all_to_all([torch.zeros(10) for _ in range(size)], each, group),
        "small all_reduce": lambda: dist.all_reduce(small, group=group),
        "recv": lambda: dist.recv(small, VICTIM, group),
        "recv of any": lambda: dist.recv(small, None, group),
        "send": lambda: dist.send(large, VICTIM, group),
        "future": lambda: dist.all_reduce(small, group=group, async_op=True).get_future().wait(),
    }


def noted(name: str, call: Callable[[], object]) -> None:
    try:
        call()
        say(name, [time.time(), "no error"])
    except Exception as error:
        say(name, [time.time(), f"{type(error).__name__}: {error}"])


def fault(kind: str, large: str) -> None:
    """The victim is lost while all other workers wait for it in all kinds of operations, each in a group of its own.
    `large`: what goes over the servers: "sum" or "hook"."""
    groups = [(name, dist.new_group()) for name in calls(dist.group.WORLD)]
    wrapped, tensor = model(), torch.zeros(ELEMENTS)
    if large == "hook":
        wrapped.register_comm_hook(hooks.State(), hooks.int8)
    for _ in range(3):
        backward(wrapped)
    for _, group in groups:
        dist.barrier(group)
    if rank == VICTIM:
        wait_for(lambda: len([*folder.glob("worker-*.json")]) == size - 1, "the others")
        if kind != "cut off":
            (folder / "struck").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL if kind == "killed" else signal.SIGSTOP)
        (folder / "ready").touch()
        signal.pause()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # of the launcher, which ends the job: here it is to see the errors
    JobEnd._end_process = lambda job_end: None  # nor does it end itself before it has seen them
    say("waits", True)
    threads = [threading.Thread(target=noted, args=(name, calls(group)[name]), daemon=True) for name, group in groups]
    for thread in threads:
        thread.start()
    noted(large, lambda: backward(wrapped) if large == "hook" else dist.all_reduce(tensor))
    for thread in threads:
        thread.join()
    say("done", True)
    sys.exit(1)


if __name__ == "__main__":
    function, place, *words = sys.argv[1:]
    folder = Path(place)
    dist.init_process_group("dmltrain")
    rank, size = dist.get_rank(), dist.get_world_size()
    globals()[function](*words)
    dist.destroy_process_group()
