"""In the launcher: the pods that are the job's hosts, and their bridges.

`Cluster` makes the pods and waits until all of them run and their bridges have called: that is the time in the queue,
which no limit of the launcher counts. A bridge serves one agent after another, so a pod whose agent is lost calls
again. In the place of a pod that is lost, Kubernetes starts another one.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import yaml

from dmltrain_launch import LaunchError, channels
from dmltrain_launch.channels.bridges.channel import BridgeChannel
from dmltrain_launch.channels.bridges.reception import Caller, Reception
from dmltrain_launch.channels.bridges.runs import addresses
from dmltrain_launch.clusters import Released
from dmltrain_launch.clusters.kubernetes import manifest, status
from dmltrain_launch.clusters.kubernetes.api import FIXES, Absent, Api, connected
from dmltrain_launch.clusters.queue import refusal, waited_too_long
from dmltrain_launch.job.host import Host
from dmltrain_launch.job.options import Options

LOOK_SECONDS = 0.5  # between looks at pods that do not run yet
EVENT_SECONDS = 3.0  # between looks for what keeps a Job from making pods
FATE_SECONDS = 2.0  # for Kubernetes to know how a pod has ended
Say = Callable[[str], None]


def say(line: str) -> None:
    sys.stderr.write(f"{line}\n")  # in one piece; print makes two


class Cluster:
    """See `dmltrain_launch.clusters`."""

    def __init__(self, options: Options, hosts: Sequence[Host] | None = None):
        if hosts is not None:
            raise Released("the pods of a job go with its launcher")
        text = os.environ.get(manifest.HOSTS_VARIABLE, "")
        self._seconds, self._queue_wait = options.connect_timeout, options.queue_wait
        self._api, job = _inside(text) if text else _outside(options)
        self._name, self._count = status.name_of(job), int(job["spec"]["parallelism"])
        self._secret = manifest.secret_name(job)
        self._is_ours = manifest.JOBSET_LABEL not in job["metadata"]["labels"]
        self._reception = Reception(options.host_ip)
        self._changed = threading.Condition()
        self._callers: dict[str, Caller] = {}  # by host, those that wait for an agent
        self._spare: list[Caller] = []  # of pods that Kubernetes has started in the place of others
        self._names: tuple[str, ...] = ()  # of the hosts, once all are there
        self._token = self._reception.expect(self._take)
        before = (
            signal.signal(signal.SIGTERM, _ended) if threading.current_thread() is threading.main_thread() else None
        )
        try:
            reached = addresses([Host("a pod")], options.host_ip)
            self._make(job, self._reception.settings_for(self._token, reached, self._seconds, stays=True))
            self._wait()
            self.hosts = [replace(each, gpus=_gpus(job)) for each in self._ordered()]
        except BaseException:
            self.close()
            raise
        finally:
            if before is not None:
                signal.signal(signal.SIGTERM, before)

    def _make(self, job: manifest.Object, settings: str) -> None:
        """The Secret first: without it no pod of the Job starts. That of a JobSet is there, or is made by it."""
        owner, secret = self._owner(), manifest.hosts_secret(job, settings)
        self._api.create(manifest.owned(secret, owner))
        if not self._is_ours:
            return
        created = self._api.create(manifest.owned(job, owner))
        if not owner:
            secret = manifest.owned(secret, created["metadata"])
            self._api.patch("Secret", self._secret, {"metadata": secret["metadata"]})

    def _owner(self) -> Mapping[str, Any] | None:
        """The Job of the pod that this process runs in; None outside of the cluster."""
        pod = os.environ.get(manifest.POD_VARIABLE)
        own = self._api.listed("Pod", fieldSelector=f"metadata.name={pod}") if pod else []
        owners = own[0]["metadata"].get("ownerReferences", []) if own else []
        return next((owner for owner in owners if owner.get("kind") == "Job"), None)

    def _pods(self) -> list[Any]:
        return self._api.listed("Pod", labelSelector=f"job-name={self._name}")

    def _wait(self) -> None:
        """Until all pods run and have called; says what they wait for. LaunchError if they never will."""
        waiting, asked_at, problem_since, began = status.Waiting(say), 0.0, 0.0, time.monotonic()
        while len(self._callers) < self._count:
            now = time.monotonic()
            try:
                pods = self._pods()
                if len(pods) < self._count and now - asked_at >= EVENT_SECONDS:
                    asked_at = now
                    self._check_events()
            except Absent as error:
                why = f"{error}; trying again"
            else:
                pods_with_secret = [pod for pod in pods if not status.waits_for_secret(pod, self._secret)]
                bad = status.image_problem(pods_with_secret, patient=False)
                problem_since = (problem_since or now) if bad else 0.0
                _check(pods_with_secret, patient=now - problem_since < self._seconds)
                why = status.why_waiting(pods, self._count, "pods")
            waiting.tell(why, now)
            waited_too_long(why or "waiting for the bridges of all pods", began, self._queue_wait)
            with self._changed:
                self._changed.wait_for(lambda: len(self._callers) >= self._count, LOOK_SECONDS)
        self._names = tuple(self._callers)

    def _check_events(self) -> None:
        events = self._api.listed("Event", fieldSelector=f"involvedObject.name={self._name}")
        if words := status.refused(events):
            raise LaunchError(f"Kubernetes makes no pods for the Job {self._name}: {with_fix(words)}")

    def _ordered(self) -> list[Host]:
        """The hosts in the order of their nodes, so that ranks do not depend on which pod has called first."""
        nodes = {status.name_of(pod): status.node(pod) for pod in self._pods()}
        return [Host(name) for name in sorted(self._callers, key=lambda name: (_natural(nodes.get(name, "")), name))]

    def _take(self, caller: Caller) -> bool:
        with self._changed:
            if not self._names and len(self._callers) >= self._count:
                return False
            if self._names and caller.host not in self._names:
                self._spare.append(caller)
            else:
                self._callers[caller.host] = caller
            self._changed.notify_all()
            return True

    def connect(self, host: Host, mark: str, timeout: float | None = None) -> BridgeChannel:
        """A channel to a new agent; LaunchError if that takes more than `timeout` seconds (None: --connect-timeout)."""
        seconds = self._seconds if timeout is None else timeout
        with self._changed:
            self._changed.wait_for(lambda: host.name in self._callers or self._spare, seconds)
            caller = self._callers.pop(host.name, None) or (self._spare.pop() if self._spare else None)
        if caller is None:
            fate = self._fate(host.name, 0.0) or "its bridge does not call; `kubectl logs` of the pod may say why"
            raise LaunchError(f"{host.name} was not reached within {seconds:g} s (--connect-timeout): {fate}", 125)
        command, text = channels.remote_command(host, mark)
        named = str(caller)
        return BridgeChannel(caller.stream, named, command, text, lambda limit: self._fate(caller.host, limit))

    def _fate(self, pod: str, seconds: float) -> str:
        """How a pod has ended, as text, if Kubernetes knows that within so many seconds; else ""."""
        until = time.monotonic() + min(seconds, FATE_SECONDS)
        while True:
            try:
                pods = self._api.listed("Pod", fieldSelector=f"metadata.name={pod}")
            except LaunchError:
                return ""
            text = status.fate(pods[0]) if pods else status.DELETED
            if text or time.monotonic() >= until:
                return text and f"its pod {text}"
            time.sleep(0.1)

    def close(self) -> None:
        """End the bridges. Agents that still run then end their processes and themselves."""
        self._reception.close()
        for caller in (*self._callers.values(), *self._spare):
            caller.stream.abort()
        if not self._is_ours:
            return  # the JobSet ends its pods when the launcher has ended
        try:
            self._api.delete("Job", self._name)
        except LaunchError as error:
            say(f"warning: the Job {self._name} is left: {error}")


def _inside(text: str) -> tuple[Api, manifest.Object]:
    job: manifest.Object = yaml.safe_load(text)
    return connected("", job["metadata"]["namespace"], inside=True), job


def _outside(options: Options) -> tuple[Api, manifest.Object]:
    if options.kube_jobset == "on":
        raise LaunchError("--kube-jobset on: a launcher outside of the cluster makes a plain Job: remove one of them")
    api = connected(options.kube_context, options.kube_namespace, inside=False)
    name = options.job or f"job-{os.getpid()}"
    return api, manifest.hosts_job(manifest.described(name, api.namespace, options))


def _ended(number: int, frame: object) -> None:
    """The first process of a container ignores SIGTERM, if it does not handle it."""
    raise SystemExit(128 + number)


def _check(pods: Sequence[status.Found], patient: bool) -> None:
    """LaunchError for a pod that will never call."""
    if words := status.image_problem(pods, patient):
        raise LaunchError(f"{words}\nIs --image right, and may the cluster's nodes pull it (imagePullSecrets)?")
    for pod in pods:
        if status.phase(pod) in (status.FAILED, status.SUCCEEDED):
            raise LaunchError(
                f"the pod {status.name_of(pod)} {status.fate(pod)} before its bridge had called: `kubectl logs "
                f"{status.name_of(pod)}` may say why; the image needs python3, and its nodes must reach this launcher",
                125,
            )


def with_fix(words: str) -> str:
    """What Kubernetes has said, with what to do about it."""
    return words + refusal(words, FIXES)


def _gpus(job: manifest.Object) -> tuple[str, ...]:
    """The devices that the workers of a pod share."""
    limits = job["spec"]["template"]["spec"]["containers"][0].get("resources", {}).get("limits", {})
    return tuple(map(str, range(int(limits.get(manifest.GPU, 0)))))


def _natural(name: str) -> tuple[object, ...]:
    """h2 before h10."""
    return tuple((0, int(word)) if word.isdigit() else (1, word) for word in re.split(r"(\d+)", name))
