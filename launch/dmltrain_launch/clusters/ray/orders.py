"""Orders for bridges, which `relay` brings: one line of JSON over an abstract unix socket, from this user's processes.

An order is {"hosts": [{"name", "python"}], "settings": text}: start a bridge on each host. The answers are lines
{"said": text} and at last, when all bridges have ended, {"code": number}. When its connection ends, its bridges do.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dmltrain_launch import LaunchError
from dmltrain_launch.clusters.ray.group import living
from dmltrain_launch.clusters.ray.keeper import Place, actor, explanation
from dmltrain_launch.clusters.ray.placement import Bundle, find, text_of

SLOW_SECONDS = 3.0  # for an actor to start: then the user is told
SIGNALLED = 128  # from here on an exit code of a shell is a signal's


class Order:
    """`ended` is set when the `relay` that has brought it is gone."""

    def __init__(self, request: Mapping[str, Any], connection: socket.socket):
        self.hosts: list[dict[str, str]] = request["hosts"]
        self.settings: str = request["settings"]
        self.connection, self.ended = connection, threading.Event()
        self.calls: dict[Any, Place] = {}  # by Ray's reference to the bridge's result

    def say(self, text: str) -> None:
        self.answer({"said": text})

    def answer(self, message: Mapping[str, object]) -> None:
        with contextlib.suppress(OSError):
            self.connection.sendall(json.dumps(message).encode() + b"\n")


class Orders:
    """`places` are those of the placement group. Another node is asked for a `bundle`. `removed`: variables that do not
    reach bridges."""

    def __init__(self, places: dict[str, Place], bundle: Bundle, removed: Sequence[str]):
        self.places, self._bundle, self._removed = places, bundle, removed
        self._listener = socket.socket(socket.AF_UNIX)
        self.name = f"dmltrain-ray-{os.getpid()}-{os.urandom(8).hex()}"
        self._listener.bind("\0" + self.name)
        self._listener.listen()

    def take(self) -> None:
        """For ever."""
        while True:
            connection, _ = self._listener.accept()
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            if struct.unpack("3i", credentials)[1] == os.getuid():
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
            else:
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            with connection.makefile(encoding="utf-8") as stream:
                order = Order(json.loads(stream.readline()), connection)
            threading.Thread(target=self._end_with, args=(order,), daemon=True).start()
            order.answer({"code": self._carry_out(order)})

    def _end_with(self, order: Order) -> None:
        """Wait for the end of an order's connection. Then end the keepers of the bridges that still run, and so these;
        they are started again when they are needed."""
        with contextlib.suppress(OSError):
            order.connection.recv(1)
        order.ended.set()
        for call, place in list(order.calls.items()):
            if not ray.wait([call], timeout=0)[0]:
                place.kill()

    def _carry_out(self, order: Order) -> int:
        """Run the bridges of an order to their end; returns the engine's exit code: 2, and nothing is run, if Ray has
        no such node."""
        try:
            places = [self._place(host["name"]) for host in order.hosts]
        except LaunchError as error:
            order.say(str(error))
            return error.code
        for index, (host, place) in enumerate(zip(order.hosts, places, strict=True)):
            if self._ready(place, order):
                order.calls[place.start(host["python"], index, order.settings, self._removed)] = place
        failed, left = len(order.calls) < len(order.hosts), list(order.calls)
        while left:
            (ready,), left = ray.wait(left, num_returns=1)
            code, said = _result(ready)
            if code:
                failed = True
                order.say(f"{order.calls[ready].name}: {said}")
            if code > 0:  # a bridge that could not reach the launcher: the others need not try
                break
        return int(failed)

    def _place(self, name: str) -> Place:
        """The place on that node, where a keeper lives or is being started. LaunchError if there is no such node.

        A node of the placement group keeps its resources there when its keeper is lost.
        """
        old = self.places.get(name)
        if old and old.lives():
            return old
        node = find(name, living())
        others = {} if old else dict(self._bundle)
        cpus, gpus, memory = (others.pop(each, 0.0) for each in ("CPU", "GPU", "memory"))
        keeper = actor(NodeAffinitySchedulingStrategy(node.id, soft=False), cpus, gpus, memory, others)
        place = Place(name, node, keepers=[keeper], cpus=old.cpus if old else cpus, gpus=old.gpus if old else "")
        self.places[name] = place
        return place

    def _ready(self, place: Place, order: Order) -> bool:
        """Wait for the keeper of a place. False if it failed, after a message to the user, or if the order has
        ended."""
        if place.facts:
            return True
        asked, warned = place.keepers[0].facts.remote(), False
        while not ray.wait([asked], timeout=SLOW_SECONDS)[0]:
            if order.ended.is_set():
                place.kill()
                return False
            if not warned:
                needs = f" with {text_of(self._bundle)}" if self._bundle else ""
                order.say(f"{place.name}: Ray has not started an actor{needs} there yet")
                warned = True
        try:
            place.facts = ray.get(asked)
        except ray.exceptions.RayError as error:
            order.say(f"{place.name}: {explanation(error)}")
            return False
        place.gpus = place.gpus or place.facts["gpus"]
        return True


def _result(call: Any) -> tuple[int, str]:
    """How a bridge ended: 0 also by a signal, which the launcher notices itself; -1 if Ray has lost its keeper."""
    try:
        code, printed = ray.get(call)
        return (code, printed.strip()) if 0 < code < SIGNALLED else (0, "")
    except ray.exceptions.RayError as error:
        return -1, explanation(error)
