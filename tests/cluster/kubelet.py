#!/usr/bin/env python3
"""A kubelet for tests: makes a test bed's host a node of Kubernetes, and runs pods there as processes.

kubelet.py SERVER TOKEN CA NODE ADDRESS FOLDER PATH

A pod's first container is its command in namespaces of its own: processes, mounts and a host name, with the network of
its host. Its image is ignored, but a name with "missing" in it cannot be pulled. Real are: environment (also of
Secrets, ConfigMaps and fields), volumes of Secrets, ConfigMaps and tokens, working folder, logs by the
kubelet's API, exit codes, SIGTERM and the grace period. Not there: other containers, probes, restarts, limits, exec.
Standard library only.
"""

import base64
import contextlib
import datetime
import http.client
import http.server
import json
import os
import queue
import shlex
import signal
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

PORT = 10250
BEAT_SECONDS, LOOK_SECONDS = 2.0, 0.1
CAPACITY = {"cpu": "4", "memory": "4Gi", "pods": "110", "nvidia.com/gpu": "2", "ephemeral-storage": "10Gi"}
MERGE = "application/strategic-merge-patch+json"


def now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


class Api:
    """Each thread keeps its connection: TLS takes both sides longer than most answers."""

    def __init__(self, server: str, token: str, ca: str):
        self.server, self.token = server, token
        self.tls = ssl.create_default_context(cafile=ca)
        self._kept = threading.local()

    def watch(self, path: str) -> Any:
        """The answer, which is to be read line by line."""
        headers = {"Authorization": f"Bearer {self.token}"}
        return urllib.request.urlopen(
            urllib.request.Request(self.server + path, headers=headers), context=self.tls, timeout=600.0
        )

    def call(self, method: str, path: str, body: Any = None, kind: str = "application/json") -> Any:
        """OSError if the server is away; urllib.error.HTTPError if it refuses."""
        if not hasattr(self._kept, "connection"):
            where = urllib.parse.urlsplit(self.server).netloc
            self._kept.connection = http.client.HTTPSConnection(where, context=self.tls, timeout=60.0)
        data = None if body is None else json.dumps(body)
        try:
            self._kept.connection.request(
                method, path, data, {"Authorization": f"Bearer {self.token}", "Content-Type": kind}
            )
            reply = self._kept.connection.getresponse()
            text = reply.read()
        except (OSError, http.client.HTTPException) as error:
            del self._kept.connection
            raise OSError(f"{self.server}{path}: {error!r}") from None
        if reply.status >= 300:
            raise urllib.error.HTTPError(path, reply.status, reply.reason, reply.headers, None)
        return json.loads(text)


class Unready(Exception):
    """Why a container waits: a reason, and words."""


class Pod:
    """A pod of this node. `status` is what the API server was told last."""

    def __init__(self, kubelet: "Kubelet", found: Any):
        self.kubelet, self.found = kubelet, found
        meta = found["metadata"]
        self.name, self.space, self.uid = meta["name"], meta["namespace"], meta["uid"]
        self.path = f"/api/v1/namespaces/{self.space}/pods/{self.name}"
        self.container = found["spec"]["containers"][0]
        self.log = kubelet.folder / f"{self.uid}.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.printed = threading.Event()  # all of its output is in the log
        self.started_at, self.killed_at, self.waits = now(), 0.0, ""
        self.over = found["status"].get("phase") in ("Succeeded", "Failed")

    # -- what it runs ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        try:
            if "missing" in self.container["image"]:
                raise Unready("ErrImagePull", f"{self.container['image']}: no such image")
            command, environment = self._command(), self._environment()
        except Unready as error:
            return self._wait(*error.args)
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        threading.Thread(target=self._copy, daemon=True).start()
        self._tell("Running", {"running": {"startedAt": self.started_at}}, True)

    def _wait(self, reason: str, words: str) -> None:
        if reason != self.waits:
            self.waits = reason
            self._tell("Pending", {"waiting": {"reason": reason, "message": words}}, False)

    def _command(self) -> list[str]:
        """In its namespaces: names and mounts, then the container's own command."""
        lines = [
            "set -e",
            "mount -t proc proc /proc",
            f"hostname {self.name}",
            f"{{ cat /etc/hosts; echo {self.kubelet.address} {self.name}; }} > {self.log}.hosts",
            f"mount --bind {self.log}.hosts /etc/hosts",
        ]
        volumes = {each["name"]: each for each in self.found["spec"].get("volumes", [])}
        for mount in self.container.get("volumeMounts", []):
            lines += self._mount(volumes[mount["name"]], shlex.quote(mount["mountPath"]))
        lines += [f"cd {shlex.quote(self.container.get('workingDir', '/'))}"]
        lines += [f"exec {shlex.join([*self.container.get('command', []), *self.container.get('args', [])])}"]
        unshare = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "/bin/sh", "-c"]
        return [*unshare, "\n".join(lines)]

    def _mount(self, volume: Any, place: str) -> list[str]:
        lines = [f"mkdir -p {place}", f"mount -t tmpfs tmpfs {place}"]
        for name, data in self._files(volume).items():
            folder = self.kubelet.folder / self.uid
            folder.mkdir(mode=0o700, exist_ok=True)
            source = folder / f"{volume['name']}-{name}"
            source.write_bytes(data)
            lines.append(f"cp {source} {place}/{name}")
        return lines

    def _files(self, volume: Any) -> dict[str, bytes]:
        if "secret" in volume:
            return self._secret(volume["secret"]["secretName"])
        if "configMap" in volume:
            return self._config(volume["configMap"]["name"])
        files: dict[str, bytes] = {}
        for source in volume.get("projected", {}).get("sources", []):
            if "serviceAccountToken" in source:
                files[source["serviceAccountToken"]["path"]] = self._token()
            elif "configMap" in source:
                content = self._config(source["configMap"]["name"])
                files |= {each["path"]: content[each["key"]] for each in source["configMap"]["items"]}
            elif "downwardAPI" in source:
                for each in source["downwardAPI"]["items"]:
                    files[each["path"]] = self._field(each["fieldRef"]["fieldPath"]).encode()
        return files

    def _token(self) -> bytes:
        bound = {"kind": "Pod", "apiVersion": "v1", "name": self.name, "uid": self.uid}
        body = {"spec": {"audiences": [], "expirationSeconds": 3600, "boundObjectRef": bound}}
        account = self.found["spec"]["serviceAccountName"]
        path = f"/api/v1/namespaces/{self.space}/serviceaccounts/{account}/token"
        return self.kubelet.api.call("POST", path, body)["status"]["token"].encode()

    def _secret(self, name: str) -> dict[str, bytes]:
        found = self._object("secrets", name).get("data", {})
        return {key: base64.b64decode(value) for key, value in found.items()}

    def _config(self, name: str) -> dict[str, bytes]:
        found = self._object("configmaps", name)
        texts = {key: value.encode() for key, value in found.get("data", {}).items()}
        return texts | {key: base64.b64decode(value) for key, value in found.get("binaryData", {}).items()}

    def _object(self, kind: str, name: str) -> Any:
        try:
            return self.kubelet.api.call("GET", f"/api/v1/namespaces/{self.space}/{kind}/{name}")
        except urllib.error.HTTPError as error:
            words = "not found" if error.code == 404 else str(error)
            raise Unready("CreateContainerConfigError", f'{kind[:-1]} "{name}" {words}') from None

    def _field(self, path: str) -> str:
        known = {"metadata.name": self.name, "metadata.namespace": self.space}
        return known[path]

    def _environment(self) -> dict[str, str]:
        server = urllib.parse.urlsplit(self.kubelet.api.server)
        values = {"PATH": self.kubelet.search, "HOSTNAME": self.name, "HOME": "/root"}
        values |= {"KUBERNETES_SERVICE_HOST": server.hostname or "", "KUBERNETES_SERVICE_PORT": str(server.port)}
        for each in self.container.get("env", []):
            source = each.get("valueFrom") or {}
            if "secretKeyRef" in source:
                value = self._secret(source["secretKeyRef"]["name"])[source["secretKeyRef"]["key"]].decode()
            elif "configMapKeyRef" in source:
                value = self._config(source["configMapKeyRef"]["name"])[source["configMapKeyRef"]["key"]].decode()
            elif "fieldRef" in source:
                value = self._field(source["fieldRef"]["fieldPath"])
            else:
                value = each.get("value", "")
            values[each["name"]] = value
        return values

    def _copy(self) -> None:
        assert self.process and self.process.stdout
        with self.log.open("ab", buffering=0) as file:
            for line in self.process.stdout:
                seconds, rest = divmod(time.time_ns(), 10**9)
                stamp = f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{rest:09d}Z"
                file.write(stamp.encode() + b" " + line.rstrip(b"\n") + b"\n")
        self.printed.set()

    # -- how it ends -------------------------------------------------------------------------------------------------

    def look(self) -> None:
        if self.process is None and not self.over and "deletionTimestamp" not in self.found["metadata"]:
            self.start()
        if self.process and not self.over and (code := self.process.poll()) is not None:
            self.over = self.printed.wait(1.0) or True
            code = code if code >= 0 else 128 - code
            state = {"exitCode": code, "reason": "Error" if code else "Completed", "finishedAt": now()}
            state["startedAt"] = self.started_at
            self._tell("Failed" if code else "Succeeded", {"terminated": state}, False)
        if "deletionTimestamp" in self.found["metadata"]:
            self._delete()

    def _delete(self) -> None:
        """SIGTERM, after the grace period SIGKILL, and then the pod is gone."""
        if self.process and self.process.poll() is None:
            grace = float(self.found["metadata"].get("deletionGracePeriodSeconds") or 0)
            if not self.killed_at:
                self.killed_at = time.monotonic() + grace
                self.send(signal.SIGTERM)
            if time.monotonic() >= self.killed_at:
                self.process.kill()
            return
        with contextlib.suppress(urllib.error.HTTPError):
            self.kubelet.api.call("DELETE", self.path, {"gracePeriodSeconds": 0, "preconditions": {"uid": self.uid}})
        self.kubelet.pods.pop(self.uid, None)

    def send(self, number: int) -> None:
        """To the first process of the container."""
        assert self.process
        with contextlib.suppress(OSError, IndexError):
            children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
            os.kill(int(children.split()[0]), number)

    def _tell(self, phase: str, state: Any, ready: bool) -> None:
        name = self.container["name"]
        one = {"name": name, "image": "", "imageID": "", "ready": ready, "restartCount": 0, "state": state}
        address = self.kubelet.address
        status = {"phase": phase, "hostIP": address, "podIP": address, "podIPs": [{"ip": address}]}
        status |= {"startTime": self.started_at, "containerStatuses": [one]}
        status |= {"conditions": [{"type": "Ready", "status": str(ready)}]}
        with contextlib.suppress(urllib.error.HTTPError):  # it is gone
            self.kubelet.api.call("PATCH", f"{self.path}/status", {"status": status}, MERGE)


class Kubelet:
    def __init__(self, api: Api, node: str, address: str, folder: Path, search: str):
        self.api, self.node, self.address, self.folder, self.search = api, node, address, folder, search
        self.pods: dict[str, Pod] = {}
        self.news: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def register(self) -> None:
        made = {"metadata": {"name": self.node, "labels": {"kubernetes.io/hostname": self.node}}}
        try:
            self.api.call("POST", "/api/v1/nodes", made)
        except urllib.error.HTTPError as error:
            if error.code != 409:
                raise

    def beat(self) -> None:
        conditions = [{"type": "Ready", "status": "True", "reason": "Test", "message": "", "lastHeartbeatTime": now()}]
        status = {"capacity": CAPACITY, "allocatable": CAPACITY, "conditions": conditions}
        status |= {"addresses": [{"type": "InternalIP", "address": self.address}]}
        status |= {"daemonEndpoints": {"kubeletEndpoint": {"Port": PORT}}}
        self.api.call("PATCH", f"/api/v1/nodes/{self.node}/status", {"status": status}, MERGE)

    def watch(self) -> None:
        """Puts each change of a pod of this node into `news`, for ever."""
        path = f"/api/v1/pods?fieldSelector=spec.nodeName%3D{self.node}"
        while True:
            with contextlib.suppress(OSError, ValueError, KeyError):
                found = self.api.call("GET", path)
                for each in found["items"]:
                    self.news.put(each)
                version = found["metadata"]["resourceVersion"]
                with self.api.watch(f"{path}&watch=true&resourceVersion={version}") as changes:
                    for line in changes:
                        change = json.loads(line)
                        if change["type"] in ("ADDED", "MODIFIED"):
                            self.news.put(change["object"])
            time.sleep(LOOK_SECONDS)

    def run(self) -> None:
        threading.Thread(target=self.watch, daemon=True).start()
        beaten = 0.0
        while True:
            try:
                if time.monotonic() - beaten > BEAT_SECONDS:
                    self.beat()
                    beaten = time.monotonic()
                for pod in list(self.pods.values()):
                    pod.look()
            except OSError as error:  # the API server is away
                print(error, file=sys.stderr, flush=True)
            with contextlib.suppress(queue.Empty):
                self.take(self.news.get(timeout=LOOK_SECONDS))

    def take(self, found: Any) -> None:
        uid = found["metadata"]["uid"]
        if uid in self.pods:
            self.pods[uid].found = found
        else:
            self.pods[uid] = Pod(self, found)

    def serve(self, pem: str) -> None:
        """GET /containerLogs/NAMESPACE/POD/CONTAINER, as the API server asks for logs."""
        kubelet = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                url = urllib.parse.urlsplit(self.path)
                query = {key: values[0] for key, values in urllib.parse.parse_qs(url.query).items()}
                _, kind, space, name, *_ = url.path.split("/")
                found = [pod for pod in kubelet.pods.values() if (pod.space, pod.name) == (space, name)]
                if kind != "containerLogs" or not found:
                    return self.send_error(404)
                self.send_response(200)
                self.send_header("Content-Type", "text/plain")
                self.end_headers()
                with contextlib.suppress(OSError):
                    copy(found[-1], self.wfile, query)

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        server = http.server.ThreadingHTTPServer((self.address, PORT), Handler)
        server.daemon_threads = True
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(pem)
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()


def copy(pod: Pod, out: Any, query: dict[str, str]) -> None:
    """A pod's log, with `follow` until the pod has ended."""
    follow, stamps, since = query.get("follow") == "true", query.get("timestamps") == "true", query.get("sinceTime", "")
    pod.log.touch()
    with pod.log.open("rb") as file:
        while True:
            over = pod.printed.is_set() or not follow
            for line in iter(file.readline, b""):
                stamp, _, text = line.partition(b" ")
                if stamp[:19].decode() >= since[:19]:
                    out.write(line if stamps else text)
            out.flush()
            if over:
                return
            time.sleep(LOOK_SECONDS / 2)


def main() -> None:
    server, token, ca, node, address, folder, search = sys.argv[1:]
    kubelet = Kubelet(Api(server, token, ca), node, address, Path(folder), search)
    kubelet.register()
    kubelet.serve(f"{folder}/kubelet.pem")
    kubelet.run()


if __name__ == "__main__":
    main()
