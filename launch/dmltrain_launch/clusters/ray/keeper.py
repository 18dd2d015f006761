"""The actors of a job: a keeper starts bridges on its node, as its own children, which end when it does."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import ray

from dmltrain_launch.channels.bridges.bridge import VARIABLE
from dmltrain_launch.clusters.ray.placement import Node

SAID_CHARACTERS = 2000
ANSWER_SECONDS = 3.0
AT_ONCE = 16  # calls of one keeper; it has more than two only while a lost bridge is replaced
# The bridge ends with the keeper, also when that is killed: PR_SET_PDEATHSIG with SIGTERM.
LOAD = f'import ctypes, json, os; ctypes.CDLL(None).prctl(1, 15); exec(json.loads(os.environ["{VARIABLE}"])["program"])'


class Keeper:
    """Nodes need nothing of `dmltrain_launch`: Ray sends this class by value."""

    def __init__(self) -> None:
        self._starter = ThreadPoolExecutor(1)  # a child's PR_SET_PDEATHSIG is about the thread that has started it

    def facts(self) -> dict[str, str]:
        """What is the keeper's on its node. `gpus`: numbers or names of those that Ray has given it."""
        gpus = ray.get_runtime_context().get_accelerator_ids().get("GPU")
        return {
            "host": socket.gethostname(),
            "python": sys.executable,
            "folder": os.getcwd(),
            "gpus": os.environ.get("CUDA_VISIBLE_DEVICES") or os.environ.get("HIP_VISIBLE_DEVICES", "") if gpus else "",
        }

    def run(self, argv: Sequence[str], own: Mapping[str, str], removed: Sequence[str]) -> tuple[int, str]:
        """Run a bridge to its end: its exit code, and what it has printed. Ray's own variables do not reach it."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if name not in removed and (name == "RAY_ADDRESS" or not name.startswith("RAY_"))
        }
        popen = self._starter.submit(
            subprocess.Popen,
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**kept, **own},
        ).result()
        printed, _ = popen.communicate()
        return popen.returncode, printed.decode(errors="replace")[-SAID_CHARACTERS:]


def actor(where: object, cpus: float, gpus: float, memory: float, others: Mapping[str, float]) -> Any:
    """A new keeper, which Ray starts as soon as there is room for it."""
    options: dict[str, Any] = {"num_cpus": cpus, "num_gpus": gpus, "resources": dict(others)}
    if memory:
        options["memory"] = memory
    return ray.remote(Keeper).options(scheduling_strategy=where, max_concurrency=AT_ONCE, **options).remote()


@dataclass
class Place:
    """A node of the job, and what is there. `bundles`: their numbers in the placement group; [] outside of it."""

    name: str
    node: Node
    bundles: list[int] = field(default_factory=list)
    keepers: list[Any] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)
    gpus: str = ""
    cpus: float = 0.0

    def start(self, python: str, index: int, settings: str, removed: Sequence[str]) -> Any:
        """Start bridge `index`; returns Ray's reference to the result of `Keeper.run`."""
        argv = [python or self.facts["python"], "-I", "-S", "-X", "utf8", "-c", LOAD, "dmltrain-bridge", str(index)]
        own = {VARIABLE: settings, "DMLTRAIN_STEP_GPUS": self.gpus}
        if self.gpus:
            own["CUDA_VISIBLE_DEVICES"] = self.gpus
        if self.cpus:
            own["DMLTRAIN_STEP_CPUS"] = f"{self.cpus:g} {self.node.id}"
        return self.keepers[0].run.remote(argv, own, removed)

    def lives(self) -> bool:
        """Whether its keeper answers."""
        try:
            ray.get(self.keepers[0].facts.remote(), timeout=ANSWER_SECONDS)
        except ray.exceptions.RayError:
            return False
        return True

    def kill(self) -> None:
        for keeper in self.keepers:
            with contextlib.suppress(Exception):  # whatever Ray says of an actor that has ended
                ray.kill(keeper)


def explanation(error: BaseException) -> str:
    """What an error of Ray says, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines)[:SAID_CHARACTERS] or type(error).__name__
