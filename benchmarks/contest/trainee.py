"""One worker of a training contest (ddp.py): the same network, batches and optimizer in each system.

A block is timed from its first step until the weights of its last step are complete, so a system that defers waits
gains only what it overlaps. The answer has the mean seconds of a step, CPU seconds, and a digest of all weights.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import sys
import time
from multiprocessing.connection import Connection
from typing import Any, Protocol

import psutil
import torch
import torch.distributed
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import dmltrain.kvstore
from contest import networks
from contest.loop import PIPE_VARIABLE, receive
from contest.lossy import parameters
from contest.training_systems import STALENESS, SYSTEMS, System
from contest.unequal import Unequal
from dmltrain.backends.torch import devices, plain_step
from dmltrain.backends.torch.distributed import connect
from dmltrain.kvstore.choices import ExchangeChoices

BATCHES = 4  # different ones, in turn
RATE, MOMENTUM = 1e-3, 0.9


class Peer(Protocol):
    """One worker of a system: its model and optimizer are called as in any training script."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    rank: int

    def settle(self) -> None:
        """Wait until the weights of all steps so far are complete."""

    def close(self) -> None:
        """Leave the job."""


class Ddp:
    """DistributedDataParallel over gloo or dmltrain, or NCCL where each worker has its `own_gpu`. Statistics of batch
    norms stay each worker's own, as with dmltrain."""

    def __init__(self, module: torch.nn.Module, system: System, batch: int, own_gpu: bool) -> None:
        _choose_interface()
        if system.group == "dmltrain":
            import dmltrain.torch  # which registers its backend
        torch.distributed.init_process_group("nccl" if own_gpu and system.group == "gloo" else system.group)
        self.rank = torch.distributed.get_rank()
        self.model = DistributedDataParallel(module, broadcast_buffers=False)
        self.optimizer = sgd(module)
        if system.group == "dmltrain" and system.codec != "none":
            hooks = dmltrain.torch.hooks
            self.model.register_comm_hook(hooks.State(), getattr(hooks, system.codec))
        elif system.codec == "bf16":
            from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

            # DDP refuses a hook of this name with gloo, but the hook itself works
            self.model.register_comm_hook(None, lambda state, bucket: bf16_compress_hook(state, bucket))
        elif system.codec == "powersgd":
            from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
            self.model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    def settle(self) -> None:
        pass

    def close(self) -> None:
        torch.distributed.destroy_process_group()


class Dmltrain:
    """`connect`, which `dmltrain.distribute` calls."""

    def __init__(self, module: torch.nn.Module, system: System, batch: int, own_gpu: bool) -> None:
        staleness = STALENESS if system.kvstore == "dist_ssp" else None
        shares = "links" if system.links else None
        self.store = dmltrain.kvstore.create(system.kvstore, staleness=staleness, server_shares=shares)
        self.rank = self.store.rank
        if system.codec != "none":
            self.store.set_gradient_compression(parameters(system.codec, self.store.num_workers))
        self.model = module
        factors = batch if system.factors else 0
        choices = ExchangeChoices(self.store.type, factors=factors, defer=system.defer, step_early=system.early)
        self.distributed = connect(module, sgd(module), self.store, choices)
        for choice in self.distributed.choices if self.rank == 0 else ():
            print(choice, file=sys.stderr)
        self.optimizer = self.distributed

    def settle(self) -> None:
        self.distributed.settle()

    def close(self) -> None:
        self.store.close()


def sgd(module: torch.nn.Module) -> torch.optim.Optimizer:
    plain_step.postpone_compiler()  # DDP has imported it, and the others need not: a second
    return torch.optim.SGD(module.parameters(), lr=RATE, momentum=MOMENTUM)


def _choose_interface() -> None:
    """Let gloo use the interface of this host's address: it would look up the host's name."""
    own = os.environ["DMLC_NODE_HOST"]
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == own for address in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


class Training:
    """One worker's steps."""

    def __init__(self, peer: Peer, made: networks.Made, batch: int, unequal: Unequal) -> None:
        self.peer, self.unequal, self.step = peer, unequal, 0
        self.trained = 0.0  # seconds of all turns before this one
        draw = torch.Generator().manual_seed(1000 + peer.rank)
        self.device = device = next(made.module.parameters()).device
        self.batches = [
            tuple(
                each.to(device)
                for each in (
                    torch.randn(batch, *made.sample, generator=draw),
                    torch.randint(made.classes, (batch,), generator=draw),
                )
            )
            for _ in range(BATCHES)
        ]

    def run(self, steps: float, seconds: float = math.inf) -> tuple[int, float, float]:
        """Train until so many steps are made or so many seconds have passed. Returns the number of steps, and a step's
        seconds and CPU seconds, means."""
        begun, worked, first = time.perf_counter(), time.process_time(), self.step
        while self.step - first < steps and (passed := time.perf_counter() - begun) < seconds:
            self.unequal.sleep(self.step, self.trained + passed)
            self.take()
        self.peer.settle()
        devices.wait(self.device)
        made, passed = self.step - first, time.perf_counter() - begun
        self.trained += passed
        return made, passed / made, (time.process_time() - worked) / made

    def take(self) -> None:
        images, labels = self.batches[self.step % BATCHES]
        self.step += 1
        loss = functional.cross_entropy(self.peer.model(images), labels)
        self.peer.optimizer.zero_grad()
        loss.backward()
        self.peer.optimizer.step()

    def digest(self) -> str:
        """Of all weights."""
        found = hashlib.sha256()
        for parameter in self.peer.model.parameters():
            found.update(parameter.detach().cpu().numpy().tobytes())
        return found.hexdigest()[:16]


def serve(training: Training) -> None:
    """Answer the driver's requests for blocks until it closes the pipe."""
    pipe = Connection(int(os.environ[PIPE_VARIABLE]))
    pipe.send_bytes(b"ready")
    while request := receive(pipe):
        warm_up, limit = request["untimed"], request.get("seconds", math.inf)
        timed = request["steps"] - warm_up if limit == math.inf else math.inf
        if warm_up:
            training.run(warm_up)
        made, seconds, cpu_seconds = training.run(timed, limit)
        answer: dict[str, Any] = {"seconds": [seconds] * request["steps"], "cpu_seconds": [cpu_seconds]}
        answer["made"] = warm_up + made
        pipe.send_bytes(json.dumps({**answer, "digest": training.digest()}).encode())
    training.peer.close()


def _device(gpus: str | None) -> tuple[torch.device, bool]:
    """This worker's, and whether each worker has a GPU of its own."""
    if gpus is None:
        return torch.device("cpu"), False
    names, number = gpus.split(","), int(os.environ["LOCAL_RANK"])
    return devices.find(f"gpu:{names[number % len(names)]}"), len(names) >= int(os.environ["WORLD_SIZE"])


def main() -> None:
    """Run one worker of the job."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=list(SYSTEMS), required=True)
    parser.add_argument("--network", required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--stragglers", type=float, nargs=2, default=(0.0, 1.0))
    parser.add_argument("--freeze", type=float, nargs=2, default=None)
    parser.add_argument("--by-layer", type=float, default=0.0)
    parser.add_argument("--gpus")
    arguments = parser.parse_args()
    system = SYSTEMS[arguments.mode]
    made = networks.make(arguments.network, arguments.by_layer)
    device, is_own = _device(arguments.gpus)
    made.module.to(device)
    peer: Peer = (Ddp if system.group else Dmltrain)(made.module, system, arguments.batch, is_own)
    unequal = Unequal(peer.rank, arguments.pause, *arguments.stragglers, arguments.freeze)
    serve(Training(peer, made, arguments.batch, unequal))
