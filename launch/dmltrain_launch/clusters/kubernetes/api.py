"""Requests to the API server of Kubernetes, by the official client, which knows kubeconfig files and their logins.

Objects are those of the API: nested dictionaries. What fails is a LaunchError with a fix; Absent if the server does not
answer, which is worth another try.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from typing import Any

from dmltrain_launch import LaunchError

SECONDS = (10, 30)  # to connect, and for the server's answer
QUIET_SECONDS = 60  # without a line of a log: then it is asked for again
PATHS = {
    "Job": "/apis/batch/v1/namespaces/{}/jobs",
    "JobSet": "/apis/jobset.x-k8s.io/v1alpha2/namespaces/{}/jobsets",
    "Pod": "/api/v1/namespaces/{}/pods",
    "Event": "/api/v1/namespaces/{}/events",
    "Secret": "/api/v1/namespaces/{}/secrets",
    "ConfigMap": "/api/v1/namespaces/{}/configmaps",
    "ServiceAccount": "/api/v1/namespaces/{}/serviceaccounts",
    "Role": "/apis/rbac.authorization.k8s.io/v1/namespaces/{}/roles",
    "RoleBinding": "/apis/rbac.authorization.k8s.io/v1/namespaces/{}/rolebindings",
}
# what the server says: what to do
FIXES = {
    "exceeded quota": "the namespace has a ResourceQuota, which `kubectl describe quota` prints: ask for less (-n, "
    "--kube-pods, --worker-cores, --worker-memory, --worker-gpus), or wait until others have ended",
    "must specify": "the namespace's ResourceQuota wants each pod to say what it needs: give --worker-cores and "
    "--worker-memory, and --server-cores and --server-memory",
    "is attempting to grant RBAC permissions not currently held": "you may not make the launcher's Role: use "
    "--kube-service-account NAME, of an account that has it (--dry-run prints the Role)",
}
NOT_FOUND, CONFLICT = 404, 409
FILES = "KUBECONFIG"  # the names of the kubeconfig files; the client itself reads it once, when it is imported
REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"


class Absent(LaunchError):
    """The API server does not answer."""


class Gone(LaunchError):
    """There is no such object."""


class There(LaunchError):
    """There is an object of this name already."""


class Api:
    """Objects of one namespace."""

    def __init__(self, client: Any, namespace: str):
        self._client, self.namespace = client, namespace

    def create(self, manifest: Mapping[str, Any]) -> Any:
        return self._call("POST", self._path(manifest["kind"]), manifest)

    def patch(self, kind: str, name: str, change: Mapping[str, Any]) -> Any:
        return self._call("PATCH", self._path(kind, name), change)

    def get(self, kind: str, name: str) -> Any:
        return self._call("GET", self._path(kind, name))

    def listed(self, kind: str, **query: str) -> list[Any]:
        objects: list[Any] = self._call("GET", self._path(kind), query=query).get("items", [])
        return objects

    def delete(self, kind: str, name: str) -> None:
        """Nothing if it is gone."""
        with contextlib.suppress(Gone):
            self._call("DELETE", self._path(kind, name), {"propagationPolicy": "Background"})

    def log(self, pod: str, follow: bool, since: str = "") -> Iterator[bytes]:
        """The lines of a pod's log, each with its time, until it has ended or the connection has."""
        query = {"timestamps": "true", "follow": str(follow).lower()} | ({"sinceTime": since} if since else {})
        answer = self._call("GET", f"{self._path('Pod', pod)}/log", query=query, stream=True)
        rest = b""
        try:
            for data in answer.stream(1 << 16):
                *lines, rest = (rest + data).split(b"\n")
                yield from lines
        except _lost_errors() as error:
            if follow:
                return
            raise Absent(f"the log of {pod} was cut off: {_reason(error)}", 125) from None
        finally:
            answer.close()
        if rest:
            yield rest

    def serves(self, kind: str) -> bool:
        """Whether the cluster has objects of this kind, which some lack."""
        version, _, plural = PATHS[kind].partition("/namespaces/{}/")
        try:
            return any(each.get("name") == plural for each in self._call("GET", version).get("resources", ()))
        except Gone:
            return False

    def allows(self, kind: str, *verbs: str) -> bool:
        """Whether this user may do all of that with objects of this kind."""
        group, resource = PATHS[kind].split("/")[2], PATHS[kind].rpartition("/")[2]
        asked = {"namespace": self.namespace, "group": group, "resource": resource}
        review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview"}
        for verb in verbs:
            answer = self._call("POST", REVIEWS, {**review, "spec": {"resourceAttributes": {**asked, "verb": verb}}})
            if not answer.get("status", {}).get("allowed"):
                return False
        return True

    def _path(self, kind: str, name: str = "") -> str:
        return PATHS[kind].format(self.namespace) + (f"/{name}" if name else "")

    def _call(
        self, method: str, path: str, body: object = None, query: Mapping[str, str] | None = None, stream: bool = False
    ) -> Any:
        """The answer: an object, or as a stream that is not read yet."""
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        headers = {"Accept": "application/json, */*", "Content-Type": kind}
        try:
            method, url, headers, body, _ = self._client.param_serialize(
                method,
                path,
                query_params=list((query or {}).items()),
                header_params=headers,
                body=body,
                auth_settings=["BearerToken"],
            )
            limits = (SECONDS[0], QUIET_SECONDS) if stream else SECONDS
            answer = self._client.call_api(method, url, headers, body, _request_timeout=limits).response
            if not 200 <= answer.status < 300:
                raise refused(answer.status, answer.data, self.namespace)
            return answer if stream else json.loads(answer.data)
        except _lost_errors() as error:
            host = self._client.configuration.host
            raise Absent(
                f"the API server of Kubernetes does not answer at {host}: {_reason(error)}; does `kubectl get "
                "pods` work? --kube-context chooses another cluster",
                125,
            ) from None


def _lost_errors() -> tuple[type[Exception], ...]:
    import urllib3

    return urllib3.exceptions.HTTPError, OSError


def _reason(error: BaseException) -> str:
    return str(getattr(error, "reason", None) or error).rpartition(": ")[2] or repr(error)


def refused(status: int | None, body: object, namespace: str) -> LaunchError:
    """The error for an answer of the API server. Pure."""
    try:
        said = str(json.loads(body if isinstance(body, str | bytes) else "")["message"])
    except (ValueError, KeyError, TypeError):
        said = (body.decode(errors="replace") if isinstance(body, bytes) else str(body or "")).strip()[:500]
    text = f"Kubernetes refuses that ({status}): {said or 'nothing said'}"
    fix = next((each for sign, each in FIXES.items() if sign in said), "")
    if status == NOT_FOUND and f'namespaces "{namespace}" not found' in said:
        return LaunchError(
            f"{text}\n--kube-namespace {namespace}: `kubectl get namespaces` prints those that are there"
        )
    if status == NOT_FOUND:
        return Gone(text)
    if status == CONFLICT:
        return There(text)
    if not fix and status == 401:
        fix = "log in to the cluster again: `kubectl get pods` needs the same login"
    if not fix and status == 403:
        fix = f"`kubectl auth can-i --list -n {namespace}` prints what you may do; --kube-namespace chooses another one"
    if status is not None and status >= 500 or status == 429:
        return Absent(text, 125)
    return LaunchError(text + (f"\n{fix}" if fix else ""))


def connected(context: str, namespace: str, inside: bool) -> Api:
    """To the cluster of the kubeconfig's `context` ("": the current one), or `inside` of a pod to its own.
    `namespace` "": that of the context. LaunchError if there is none."""
    try:
        client, config = (importlib.import_module(f"kubernetes.{name}") for name in ("client", "config"))
    except ImportError:
        raise LaunchError(
            "--launcher kubernetes needs the Kubernetes client: pip install 'dmltrain[kubernetes]'", 127
        ) from None
    logging.getLogger("urllib3").setLevel(logging.ERROR)  # it warns of each try
    configuration = client.Configuration()
    try:
        if inside:
            config.load_incluster_config(configuration)
        else:
            config.load_kube_config(os.environ.get(FILES) or None, context or None, configuration)
            namespace = namespace or _namespace(config, context)
    except (config.ConfigException, OSError) as error:
        fix = "set KUBECONFIG to its file, or ask the cluster's administrators for one; --kube-context names one of it"
        raise LaunchError(f"no way to reach a cluster of Kubernetes: {str(error).strip()}\n{fix}") from None
    configuration.retries = False
    return Api(client.ApiClient(configuration), namespace or "default")


def _namespace(config: Any, context: str) -> str:
    every, current = config.list_kube_config_contexts(os.environ.get(FILES) or None)
    chosen = next((each for each in every if each["name"] == context), current)
    return str(chosen.get("context", {}).get("namespace") or "")
