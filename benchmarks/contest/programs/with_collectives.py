"""A process of the benchmark of collectives: a group of dmltrain's backend and one of gloo, in the same workers."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from contest.loop import PIPE_VARIABLE, receive

import dmltrain.torch  # noqa: F401 (a server's process ends here)

Call = Callable[[], Any]


def prepared(operation: str, size: int, group: Any) -> tuple[Call, Call]:
    """What a call is, and what checks the result of the first one."""
    rank, count = dist.get_rank(), dist.get_world_size()
    elements = max(1, size // 4)
    part = max(1, elements // count)
    whole, own = torch.full((elements,), rank + 1.0), torch.full((part,), rank + 1.0)
    if operation == "all_reduce":
        return lambda: dist.all_reduce(whole, group=group), lambda: expect(whole, count * (count + 1) / 2)
    if operation == "broadcast":
        return lambda: dist.broadcast(whole, 0, group=group), lambda: expect(whole, 1.0)
    whole = torch.full((part * count,), rank + 1.0)
    if operation == "all_gather":
        return lambda: dist.all_gather_into_tensor(whole, own, group=group), lambda: expect(whole[-1:], float(count))
    return lambda: dist.reduce_scatter_tensor(own, whole, group=group), lambda: expect(own, count * (count + 1) / 2)


def expect(values: torch.Tensor, value: float) -> None:
    if not bool((values == value).all()):
        raise SystemExit(f"a collective's result is {values[:3].tolist()}..., expected {value}")


def seconds(call: Call, count: int, group: Any) -> float:
    """Of one of so many calls, which all workers begin together."""
    dist.barrier(group)
    begun = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - begun) / count


def main() -> None:
    """Answer the driver's requests until it closes the pipe."""
    dist.init_process_group("dmltrain")
    groups = {"dmltrain": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    pipe = Connection(int(os.environ[PIPE_VARIABLE]))
    pipe.send_bytes(b"ready")
    while request := receive(pipe):
        blocks: dict[str, list[float]] = {name: [] for name in request["backends"]}
        calls = {name: prepared(request["operation"], request["bytes"], groups[name]) for name in blocks}
        for call, check in calls.values():
            call()
            check()
        for turn in range(request["steps"]):
            for name in list(blocks) if turn % 2 else reversed(list(blocks)):
                blocks[name].append(seconds(calls[name][0], request["calls"], groups["gloo"]))
        del calls
        answer = {"seconds": blocks["gloo"], "cpu_seconds": [0.0], "blocks": blocks}
        pipe.send_bytes(json.dumps(answer).encode())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
