"""The program beside the launcher that talks to Ray: it holds the job's place there, and starts bridges in it.

    dmltrain_launch.clusters.ray.driver

It is a process of its own because Ray ends a driver that loses its cluster, and because Ray prints to the driver's
standard output. As Ray's driver it owns the placement group and the actors: Ray removes them when this program ends,
even if it is killed.

Standard input: one line of JSON, a `Request`. When it ends, the launcher has ended, and so does this program.
SIGTERM is ignored: `ray job stop` sends it to all processes below the launcher.
Standard output: lines of JSON.
    {"waiting": text}                        while Ray has no room
    {"placed": [place], "socket": name}      all is there: the places in the order of the job's hosts, and the name of
                                             the socket for `orders`
    {"problem": text, "code": number}        it cannot be; nothing follows
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Mapping
from typing import Any

import ray

from dmltrain_launch import LaunchError
from dmltrain_launch.clusters.queue import FAULT_CODE
from dmltrain_launch.clusters.ray import keeper
from dmltrain_launch.clusters.ray.group import Group
from dmltrain_launch.clusters.ray.keeper import Place, explanation
from dmltrain_launch.clusters.ray.orders import Orders
from dmltrain_launch.clusters.ray.placement import Request

OWN_PYTHON = ("pip", "uv", "conda", "py_executable", "container", "image_uri")  # of a runtime_env: brings its Python
ANSWER_SECONDS = 60.0  # for the connection to a cluster
NAMESPACE = "dmltrain"
VERSIONS = re.compile(r"Ray: (\S+)\s+Python: (\S+).*Ray: (\S+)\s+Python: (\S+)", re.DOTALL)  # the cluster's, and ours


class Driver:
    """The connection to Ray. `say` writes a message for the launcher."""

    def __init__(self, request: Request, output: int):
        self.request, self._output = request, output
        self._group: Group | None = None
        self._places: dict[str, Place] = {}
        self._environment: dict[str, Any] = {}  # the runtime_env of the whole job of Ray

    def say(self, message: Mapping[str, object]) -> None:
        os.write(self._output, json.dumps(message).encode() + b"\n")

    def run(self) -> None:
        """Connect to Ray, get the placement, and take orders for ever. LaunchError if there is no suitable cluster, or
        no room in time."""
        self._connect()
        if self.request.bundles:
            self._group = Group(self.request, lambda text: self.say({"waiting": text}))
            self._places = self._group.places()
            if self.request.starts:
                self._group.keep(list(self._places.values()))
        places = [self._told(place) for place in self._places.values()]
        removed = ["PYTHONBREAKPOINT"]  # Ray sets them for its workers
        if "OMP_NUM_THREADS" not in (self._environment.get("env_vars") or {}):
            removed.append("OMP_NUM_THREADS")
        orders = Orders(self._places, self.request.bundle, removed)
        self.say({"placed": places, "socket": orders.name})
        orders.take()

    def _connect(self) -> None:
        watch = threading.Timer(ANSWER_SECONDS, self._give_up)
        watch.daemon = True
        watch.start()
        given = {"runtime_env": self.request.runtime_env} if self.request.runtime_env else {}
        try:
            ray.init(self.request.address, log_to_driver=False, logging_level="error", namespace=NAMESPACE, **given)
        except Exception as error:  # of many types
            raise LaunchError(unreached(error, self.request.address)) from None
        finally:
            watch.cancel()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # ray.init has set it
        ray.cloudpickle.register_pickle_by_value(keeper)
        self._environment = dict(ray.get_runtime_context().runtime_env)

    def _give_up(self) -> None:
        text = f"Ray at --address {self.request.address} has not answered within {ANSWER_SECONDS:g} s"
        self.say({"problem": f"{text}: does `ray status` work?", "code": FAULT_CODE})
        os._exit(1)

    def _told(self, place: Place) -> dict[str, Any]:
        brings = any(name in self._environment for name in OWN_PYTHON)
        return {
            "name": place.name,
            "ip": place.node.ip,
            "node": place.node.id,
            "bundles": place.bundles,
            "python": place.facts.get("python", "") if brings else "",
            "folder": place.facts.get("folder", "") if "working_dir" in self._environment else "",
        }

    def release(self) -> None:
        """Nothing of the job is left in Ray."""
        for place in list(self._places.values()):
            place.kill()
        if self._group:
            self._group.remove()
        with contextlib.suppress(Exception):
            ray.shutdown()


def unreached(error: Exception, address: str) -> str:
    """What is wrong if Ray cannot be reached, and the fix."""
    match = VERSIONS.search(str(error))
    if match:
        there, python, here, own = match.groups()
        return (
            f"the Ray cluster at --address {address} has Ray {there} and Python {python}, and this environment has Ray "
            f"{here} and Python {own}: use an environment like the cluster's (pip install ray=={there})"
        )
    if isinstance(error, ConnectionError) or "Failed to connect" in str(error):
        how = "start the job on a node of the cluster, where `ray status` works, or with --submit"
        return f"no Ray cluster at --address {address}: {explanation(error)} {how}"
    return f"Ray at --address {address}: {type(error).__name__}: {explanation(error)}"


def main() -> None:
    output = os.dup(1)
    os.dup2(2, 1)  # Ray prints to both
    sys.argv[:] = ["dmltrain-ray"]  # else Ray's workers would search for modules beside this file
    driver = Driver(Request(**json.loads(sys.stdin.readline())), output)

    def end_with_launcher() -> None:
        sys.stdin.read()
        driver.release()
        os._exit(0)

    threading.Thread(target=end_with_launcher, daemon=True).start()
    try:
        driver.run()
    except LaunchError as error:
        driver.say({"problem": str(error), "code": error.code})
        driver.release()
        os._exit(1)


if __name__ == "__main__":
    main()
