"""In the launcher: the pods that are the job's hosts, and their bridges.

`Cluster` makes the pods and waits until all of them run and their bridges have called: that is the time in the queue,
which no limit of the launcher counts. A bridge serves one agent after another, so a pod whose agent is lost calls
again. In the place of a pod that is lost, Kubernetes starts another one.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import yaml

from dmltrain_launch import LaunchError
from dmltrain_launch.channels.bridges.reception import Caller
from dmltrain_launch.clusters.called import CalledCluster
from dmltrain_launch.clusters.kubernetes import KubernetesOptions, manifest, status
from dmltrain_launch.clusters.kubernetes.api import FIXES, Absent, Api, connected
from dmltrain_launch.clusters.launcher import Released
from dmltrain_launch.clusters.queue import FAULT_CODE, Waiting, refusal, waited_too_long
from dmltrain_launch.job.host import Host, natural

LOOK_SECONDS = 0.5  # between looks at pods that do not run yet
EVENT_SECONDS = 3.0  # between looks for what keeps a Job from making pods
STILL_SECONDS = 1.0  # of what a job waits for: then it is said
FATE_SECONDS = 2.0  # for Kubernetes to know how a pod has ended
Say = Callable[[str], None]


def say(line: str) -> None:
    sys.stderr.write(f"{line}\n")  # in one piece; print makes two


class Cluster(CalledCluster):
    """See `dmltrain_launch.clusters`."""

    def __init__(self, options: KubernetesOptions, hosts: Sequence[Host] | None = None):
        if hosts is not None:
            raise Released("the pods of a job go with its launcher")
        text = os.environ.get(manifest.HOSTS_VARIABLE, "")
        self._api, job = _inside(text) if text else _outside(options)
        self._name, self._count = status.name_of(job), int(job["spec"]["parallelism"])
        self._secret = manifest.secret_name(job)
        self._is_ours = manifest.JOBSET_LABEL not in job["metadata"]["labels"]
        super().__init__(options, "pod")  # callers are known by the names of their pods
        self._spare: list[Caller] = []  # of pods that Kubernetes has started in the place of others
        self._names: tuple[str, ...] = ()  # of the hosts, once all are there
        before = (
            signal.signal(signal.SIGTERM, _ended) if threading.current_thread() is threading.main_thread() else None
        )
        try:
            self._make(job, self._settings())
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
        waiting, asked_at, problem_since, began = Waiting(say, STILL_SECONDS), 0.0, 0.0, time.monotonic()
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
        return [Host(name) for name in sorted(self._callers, key=lambda name: (natural(nodes.get(name, "")), name))]

    def _admit(self, caller: Caller) -> bool:
        if not self._names and len(self._callers) >= self._count:
            return False
        if self._names and caller.host not in self._names:
            self._spare.append(caller)
        else:
            self._callers[caller.host] = caller
        return True

    def _caller_for(self, host: Host) -> Caller | None:
        return self._callers.pop(host.name, None) or (self._spare.pop() if self._spare else None)

    def _why_silent(self, host: Host) -> str:
        return self._fate(host.name, 0.0) or "its bridge does not call; `kubectl logs` of the pod may say why"

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
        super().close()
        for caller in self._spare:
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


def _outside(options: KubernetesOptions) -> tuple[Api, manifest.Object]:
    if options.kube_jobset == "on":
        raise LaunchError("--kube-jobset on: a launcher outside of the cluster makes a plain Job: remove one of them")
    api = connected(options.kube_context, options.kube_namespace, inside=False)
    name = options.job or f"job-{os.getpid()}"
    return api, manifest.hosts_job(manifest.described(name, api.namespace, options))


def _ended(number: int, frame: object) -> None:
    """The first process of a container ignores SIGTERM, if it does not handle it."""
    raise SystemExit(128 + number)


def check_images(pods: Sequence[status.Found], patient: bool) -> None:
    """LaunchError for a pod whose image is wrong."""
    if words := status.image_problem(pods, patient):
        raise LaunchError(f"{words}\nIs --image right, and may the cluster's nodes pull it (imagePullSecrets)?")


def _check(pods: Sequence[status.Found], patient: bool) -> None:
    """LaunchError for a pod that will never call."""
    check_images(pods, patient)
    for pod in pods:
        if status.phase(pod) in (status.FAILED, status.SUCCEEDED):
            raise LaunchError(
                f"the pod {status.name_of(pod)} {status.fate(pod)} before its bridge had called: `kubectl logs "
                f"{status.name_of(pod)}` may say why; the image needs python3, and its nodes must reach this launcher",
                FAULT_CODE,
            )


def with_fix(words: str) -> str:
    """What Kubernetes has said, with what to do about it."""
    return words + refusal(words, FIXES)


def _gpus(job: manifest.Object) -> tuple[str, ...]:
    """The devices that the workers of a pod share."""
    limits = job["spec"]["template"]["spec"]["containers"][0].get("resources", {}).get("limits", {})
    return tuple(map(str, range(int(limits.get(manifest.GPU, 0)))))
