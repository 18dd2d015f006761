"""What Hadoop documents of the REST API for services, as a server: it checks what it gets against the documented
fields, answers as documented, and runs the containers as processes here, each with its own host name and processes.

Source: Hadoop's YarnServiceAPI.md and its OpenAPI description of version 1.0.0. It is no YARN: no ResourceManager was
there to compare it with.
"""

import contextlib
import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

PATH = "/app/v1/services"
# The documented fields that a request may have, and their types; a name refers to another row.
FIELDS: dict[str, dict[str, Any]] = {
    "Service": {
        **{"name": str, "version": str, "description": str, "queue": str, "lifetime": int},
        **{"components": ["Component"], "configuration": "Configuration", "resource": "Resource"},
    },
    "Component": {
        **{"name": str, "number_of_containers": int, "launch_command": str, "restart_policy": str},
        **{"resource": "Resource", "configuration": "Configuration", "placement_policy": "PlacementPolicy"},
    },
    "Resource": {"cpus": int, "memory": str, "additional": {"ResourceInformation"}},
    "ResourceInformation": {"value": int, "unit": str},
    "Configuration": {"properties": {str}, "env": {str}},
    "PlacementPolicy": {"constraints": ["PlacementConstraint"]},
    "PlacementConstraint": {"type": str, "scope": str, "target_tags": [str]},
}
REQUIRED = {"Service": ("name", "version"), "Component": ("name",), "PlacementPolicy": ("constraints",)}
ENUMS = {"restart_policy": ("ALWAYS", "ON_FAILURE", "NEVER"), "scope": ("NODE", "RACK")}
ENUMS["type"] = ("AFFINITY", "ANTI_AFFINITY", "AFFINITY_WITH_CARDINALITY")
DOMINANT = "yarn.service.container-state-report-as-service-state"
Place = Callable[[str, int, Path], list[str]]  # component, index of the container, script: the command that runs it


def beside(component: str, index: int, script: Path) -> list[str]:
    """A container with a host name and processes of its own."""
    argv = ["unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c"]
    return [*argv, f"hostname n{index + 1} && exec bash {script}"]


def wrong(value: object, kind: object, where: str = "") -> str:
    """What is wrong with a value of a request, "" if nothing is."""
    if isinstance(kind, str):
        if not isinstance(value, dict):
            return f"{where}: expected {kind}"
        unknown = [name for name in value if name not in FIELDS[kind]]
        missing = [name for name in REQUIRED.get(kind, ()) if name not in value]
        if unknown or missing:
            return f"{where}: {kind} with unknown {unknown}, without {missing}"
        found = [wrong(each, FIELDS[kind][name], f"{where}.{name}") for name, each in value.items()]
    elif isinstance(kind, list):
        if not isinstance(value, list):
            return f"{where}: expected a list"
        found = [wrong(each, kind[0], f"{where}[]") for each in value]
    elif isinstance(kind, set):
        (inner,) = kind
        found = [wrong(each, inner, f"{where}.{name}") for name, each in value.items()]  # type: ignore[attr-defined]
    else:
        name = where.rpartition(".")[2]
        right = isinstance(value, kind) and (name not in ENUMS or value in ENUMS[name])  # type: ignore[arg-type]
        found = [] if right else [f"{where} is {value!r}"]
    return next(filter(None, found), "")


class Service:
    """A service and its containers, which run from `start` on."""

    def __init__(self, asked: dict[str, Any], number: int, folder: Path, place: Place):
        self.asked, self.folder, self.place, self.state = asked, folder, place, "ACCEPTED"
        self.id = f"application_1503963985568_{number:04}"
        self.containers: list[tuple[str, int, subprocess.Popen[bytes]]] = []
        self._watch = threading.Thread(target=self._wait, daemon=True)

    def start(self) -> None:
        self.state = "STABLE"
        for component in self.asked["components"]:
            for index in range(component["number_of_containers"]):
                self.containers.append((component["name"], index, self._container(component, index)))
        self._watch.start()

    def _container(self, component: dict[str, Any], index: int) -> subprocess.Popen[bytes]:
        """As a NodeManager starts one: the command stands in double quotes in a script, in a folder of its own."""
        name = f"{component['name']}-{index}"
        folder = self.folder / name
        folder.mkdir(parents=True)
        command = component["launch_command"].replace("${COMPONENT_ID}", str(index))
        script = folder / "launch_container.sh"
        script.write_text(f'#!/bin/bash\nexec /bin/bash -c "{command} 1>{folder}/stdout.txt 2>{folder}/stderr.txt"\n')
        argv, own = self.place(component["name"], index, script), {"CONTAINER_ID": f"container_{name}"}
        environment = os.environ | component.get("configuration", {}).get("env", {}) | own
        return subprocess.Popen(argv, cwd=folder, env=environment, start_new_session=True, stdin=subprocess.DEVNULL)

    def _wait(self) -> None:
        """With the dominant component's containers the service ends."""
        properties = {each["name"]: each["configuration"]["properties"] for each in self.asked["components"]}
        first = [popen for name, _, popen in self.containers if properties[name].get(DOMINANT) == "true"]
        codes = [popen.wait() for popen in first]
        self.end()
        self.state = "FAILED" if any(codes) else "SUCCEEDED"

    def end(self) -> None:
        for _, _, popen in self.containers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(popen.pid, signal.SIGKILL)
            popen.wait()
        self.state = "STOPPED"

    def described(self) -> dict[str, Any]:
        components = []
        for component in self.asked["components"]:
            rows = [
                {
                    "id": f"container_e03_1503963985568_0002_01_{index + 2:06}",
                    "bare_host": f"n{index + 1}.example.com",
                    "state": "READY",
                    "component_instance_name": f"{name}-{index}",
                }
                for name, index, popen in self.containers
                if name == component["name"] and popen.poll() is None
            ]
            components.append({**component, "state": "STABLE", "containers": rows})
        return {**self.asked, "id": self.id, "lifetime": -1, "state": self.state, "components": components}


class Yarn:
    """`url` is for --yarn-url. `full`: new services get no container before `go`."""

    def __init__(self, folder: Path, full: bool = False, place: Place = beside):
        self.folder, self.full, self.place = folder, full, place
        self.services: dict[str, Service] = {}
        self.requests: list[tuple[str, str, str]] = []  # method, path, user
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self._answer(*server.post(json.loads(self.rfile.read(int(self.headers["Content-Length"])))))

            def do_GET(self) -> None:
                found = server.services.get(self._name())
                missing = {"diagnostics": f"Service {self._name()} not found", "code": 404}
                self._answer(*((200, found.described()) if found else (404, missing)))

            def do_DELETE(self) -> None:
                found = server.services.pop(self._name(), None)
                if found:
                    found.end()
                said = "Successfully destroyed service" if found else "does not exist"
                self._answer(200 if found else 404, {"diagnostics": f"{said} {self._name()}"})

            def _name(self) -> str:
                return urlsplit(self.path).path.removeprefix(f"{PATH}/")

            def _answer(self, code: int, content: object) -> None:
                parts = urlsplit(self.path)
                server.requests.append((self.command, parts.path, parse_qs(parts.query).get("user.name", [""])[0]))
                data = json.dumps(content).encode()
                self.send_response(code)
                self.send_header("Content-Type", "application/json;charset=utf-8")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *words: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def post(self, asked: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if problem := wrong(asked, "Service"):
            return 400, {"diagnostics": problem}
        if asked.get("queue", "default") != "default":
            why = f"Application rejected: submitted by user to unknown queue: {asked['queue']}"
            return 500, {"diagnostics": why}
        if asked["name"] in self.services:
            return 500, {"diagnostics": f"Service name {asked['name']} is already taken."}
        made = Service(asked, len(self.services) + 1, self.folder / asked["name"], self.place)
        self.services[asked["name"]] = made
        if not self.full:
            made.start()
        uri = f"/v1/services/{asked['name']}"
        return 202, {"uri": uri, "diagnostics": f"Application ID: {made.id}", "state": "ACCEPTED"}

    def go(self) -> None:
        self.full = False
        for service in self.services.values():
            service.start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        for service in self.services.values():
            service.end()


@contextlib.contextmanager
def yarn(folder: Path, full: bool = False, place: Place = beside) -> Iterator[Yarn]:
    """`place`: where containers run."""
    made = Yarn(folder, full, place)
    try:
        yield made
    finally:
        made.close()
