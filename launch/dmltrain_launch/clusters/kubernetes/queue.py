"""On the user's machine: give a job to Kubernetes, follow it, find it again, end it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from dmltrain_launch import LaunchError
from dmltrain_launch.clusters.kubernetes import KubernetesOptions, code, manifest, status
from dmltrain_launch.clusters.kubernetes.api import Absent, Api, Gone, There, connected
from dmltrain_launch.clusters.kubernetes.hosts import STILL_SECONDS, check_images, with_fix
from dmltrain_launch.clusters.queue import ENDED_CODE, FAULT_CODE, NAME, Inside, Submitted, Waiting, waited_too_long

LOOK_SECONDS = 0.3
AWAY_SECONDS = 1.0  # between tries while the API server does not answer
EVENT_SECONDS = 3.0  # between looks for what keeps a Job from making its pod
IMAGE_SECONDS = 10.0  # for an image that cannot be pulled: a registry may come back
GONE_SECONDS = 10.0  # for the pods of a job that is deleted, after their grace
NO_JOBSET = "--kube-jobset on: this cluster has no JobSet (jobset.x-k8s.io/v1alpha2 is not served): leave it out"
Say = Callable[[str], None]


def _described(job: Inside[KubernetesOptions], namespace: str, kind: str) -> manifest.Described:
    spec = manifest.described(job.name, namespace, job.options, job.words, os.environ)
    return replace(spec, files=code.archive(job.options, job.path), kind=kind)


def _kind(job: Inside[KubernetesOptions], api: Api | None) -> str:
    """Job or JobSet, by --kube-jobset and what the cluster has; without `api` that is not asked."""
    wanted, why = job.options.kube_jobset, manifest.no_jobset(job.options)
    if wanted == "on":
        if why:
            raise LaunchError(f"--kube-jobset on: {why}: leave it out")
        if api and not api.serves("JobSet"):
            raise LaunchError(NO_JOBSET)
        return "JobSet"
    if wanted == "off" or why or not api:
        return "Job"
    return "JobSet" if api.serves("JobSet") and api.allows("JobSet", "create", "get", "delete") else "Job"


class Queue:
    """See `dmltrain_launch.clusters.queue`."""

    def artefact(self, job: Inside[KubernetesOptions]) -> list[str]:
        kind = _kind(job, None)
        spec = _described(job, job.options.kube_namespace or "default", kind)
        perhaps = job.options.kube_jobset == "auto" and not manifest.no_jobset(job.options)
        secret = [f'--from-literal={name}="${name}"' for name in sorted(spec.secrets or ())]
        words = [
            "kubectl",
            "create",
            "secret",
            "generic",
            f"{spec.name}-environment",
            f"--namespace={spec.namespace}",
        ]
        return [
            f"# {kind} {spec.name}: dmltrain launch makes these objects, and has all of them deleted with the {kind}.",
            *(["# On a cluster with JobSet it makes what --kube-jobset on prints."] if perhaps else []),
            f"# By hand: `kubectl create -f FILE` makes them, and `kubectl delete {kind.lower()},configmap,secret,"
            f"serviceaccount,role,rolebinding -n {spec.namespace} -l {manifest.LABEL}={spec.name}` deletes them.",
            *([f"# The secrets, first: {' '.join([*words, *secret])}"] if secret else []),
            *manifest.text(manifest.submitted(spec)).splitlines(),
        ]

    def submit(self, job: Inside[KubernetesOptions]) -> Submitted:
        options = job.options
        spec = _described(job, "", "Job")
        api = connected(options.kube_context, options.kube_namespace, inside=False)
        spec = replace(spec, namespace=api.namespace, kind=_kind(job, api))
        (_make_set if spec.kind == "JobSet" else _make_job)(api, spec)
        record = {
            "kubernetes_job": spec.name,
            "kube_namespace": api.namespace,
            "kube_context": options.kube_context,
        }
        record["kubernetes_kind"] = spec.kind
        return Submitted(record, f"the {spec.kind} {spec.name} of Kubernetes, in the namespace {api.namespace}")

    def held(self, record: Mapping[str, Any], where: Path) -> Held:
        name, namespace, context = (record.get(key) for key in ("kubernetes_job", "kube_namespace", "kube_context"))
        kind = record.get("kubernetes_kind", "Job")
        if not (isinstance(name, str) and NAME.fullmatch(name)) or not isinstance(namespace, str):
            raise LaunchError(f"{where}: kubernetes_job is {ascii(name)}: expected the name of a Job")
        if kind not in manifest.API_OF:
            raise LaunchError(f"{where}: kubernetes_kind is {ascii(kind)}: expected Job or JobSet")
        return Held(name, namespace, context if isinstance(context, str) else "", str(kind))


def _make_job(api: Api, spec: manifest.Described) -> None:
    *others, first = manifest.submitted(spec)
    first["spec"]["parallelism"] = 0  # until all that its pod needs is there
    try:
        owner = api.create(first)["metadata"]
    except There:
        raise _there_is(api, spec) from None
    try:
        for kube_object in (*others, *manifest.environment_secret(spec)):
            api.create(manifest.owned(kube_object, owner))
        api.patch("Job", spec.name, {"spec": {"parallelism": 1}})
    except BaseException:
        api.delete("Job", spec.name)
        raise


def _make_set(api: Api, spec: manifest.Described) -> None:
    """Last the JobSet, as Kueue decides when one with its label starts, and then that the others belong to it."""
    *others, first = manifest.submitted(spec)
    others += manifest.environment_secret(spec)
    with contextlib.suppress(Gone):
        api.get("JobSet", spec.name)
        raise _there_is(api, spec)
    done: list[manifest.Object] = []
    try:
        for kube_object in (*others, first):
            owner = api.create(kube_object)["metadata"]
            done.append(kube_object)
        for kube_object in others:
            metadata = manifest.owned(kube_object, owner, "JobSet")["metadata"]
            api.patch(kube_object["kind"], kube_object["metadata"]["name"], {"metadata": metadata})
    except BaseException:
        for kube_object in reversed(done):
            api.delete(kube_object["kind"], kube_object["metadata"]["name"])
        raise


def _there_is(api: Api, spec: manifest.Described) -> LaunchError:
    return LaunchError(
        f"there is a {spec.kind} {spec.name} in the namespace {api.namespace} already: give another --job, or end "
        f"that one with `kubectl delete {spec.kind.lower()} {spec.name} -n {api.namespace}`"
    )


@dataclass(frozen=True)
class Held:
    """The Job or JobSet of this name. See `dmltrain_launch.clusters.queue`."""

    name: str
    namespace: str
    context: str
    kind: str = "Job"
    _followed: list[str] = field(default_factory=list, init=False, compare=False)  # the launcher's pod, by its name

    @cached_property
    def _api(self) -> Api:
        return connected(self.context, self.namespace, inside=False)

    def _pods(self, part: str = "") -> list[Any]:
        wanted = f"{manifest.LABEL}={self.name}" + (f",{manifest.PART}={part}" if part else "")
        return self._api.listed("Pod", labelSelector=wanted)

    @property
    def lives(self) -> bool:
        try:
            return status.job_lives(self._api.get(self.kind, self.name))
        except Gone:
            return False

    def state(self) -> list[str]:
        named = f"Kubernetes' {self.kind} {self.name} in the namespace {self.namespace}"
        try:
            job = self._api.get(self.kind, self.name)
        except Gone:
            return [f"{named} has ended, and is deleted"]
        return [f"{named} {status.job_state(job)}", *status.table(self._pods(), manifest.PART)]

    def cancel(self) -> None:
        """Delete it, and all that belongs to it; return when its pods are gone."""
        self._api.delete(self.kind, self.name)
        began, pods = time.monotonic(), self._pods()
        while pods and time.monotonic() - began < status.grace(pods) + GONE_SECONDS:
            time.sleep(LOOK_SECONDS)
            pods = self._pods()
        if pods:
            where = ", ".join(f"{status.name_of(pod)} on {status.node(pod) or 'no node'}" for pod in pods)
            raise LaunchError(f"these pods are not gone, which they are when their nodes answer: {where}", FAULT_CODE)

    def lines(self, wait: bool, say: Say, limit: float | None = None) -> Iterator[bytes]:
        pod = self._started(wait, say, limit)
        self._followed[:] = [pod] if pod else []
        shown, trouble = Shown(), Waiting(say, STILL_SECONDS)
        while pod:
            try:
                over = not wait or self._launcher_ended()  # then a last read has all that a lost stream had not
                yield from shown.new(self._api.log(pod, not over, ""))  # all: a time says nothing
                if over:
                    return
                time.sleep(LOOK_SECONDS)
            except Gone:
                return
            except Absent as error:
                trouble.tell(f"{error}; trying again", time.monotonic())
                time.sleep(AWAY_SECONDS)

    def _started(self, wait: bool, say: Say, limit: float | None) -> str:
        """The name of the launcher's pod, when that has started; "" without `wait` if it has not."""
        waiting, asked_at, problem_since, queue = Waiting(say, STILL_SECONDS), 0.0, 0.0, ""
        began = time.monotonic()
        while True:
            now = time.monotonic()
            try:
                pods = self._pods(manifest.LAUNCHER)
                for pod in pods:
                    if status.phase(pod) != status.PENDING:
                        return status.name_of(pod)
                if not wait:
                    return ""
                problem_since = (problem_since or now) if status.image_problem(pods, False) else 0.0
                check_images(pods, patient=now - problem_since < IMAGE_SECONDS)
                if not pods and now - asked_at > EVENT_SECONDS:
                    asked_at = now
                    queue = self._check_job()
                why = status.why_waiting(pods, 1, "pods (the launcher's)")
                why += f": {queue}" if queue and not pods else ""
            except Absent as error:
                why = f"{error}; trying again"
            waiting.tell(why, now)
            waited_too_long(why, began, limit)
            time.sleep(LOOK_SECONDS)

    def _check_job(self) -> str:
        """Why there is no pod yet, if it waits for its queue. LaunchError if there will be none."""
        try:
            job = self._api.get(self.kind, self.name)
        except Gone:
            raise self._deleted() from None
        for name in (self.name, *([f"{self.name}-{manifest.LAUNCHER}-0"] if self.kind == "JobSet" else [])):
            events = self._api.listed("Event", fieldSelector=f"involvedObject.name={name}")
            if words := status.refused(events):
                raise LaunchError(f"Kubernetes makes no pod for the {self.kind} {self.name}: {with_fix(words)}")
        return f"the {self.kind} {status.job_state(job)}" if job["spec"].get("suspend") else ""

    def _launchers(self) -> list[Any]:
        """The launcher's pod. Where somebody deletes it, a Job may make another one (seen with Kubernetes 1.20). That
        one finds the first one's Secret, and refuses to start the job again: its exit code is not the job's."""
        pods = self._pods(manifest.LAUNCHER)
        return [pod for pod in pods if not self._followed or status.name_of(pod) in self._followed]

    def _launcher_ended(self) -> bool:
        return all(map(status.has_ended, self._launchers()))

    def stop(self) -> bool:
        return False

    def exit_code(self) -> int:
        for pod in self._launchers():
            if (code := status.exit_code(pod)) is not None:
                return code
            if words := status.fate(pod):
                raise LaunchError(f"the launcher's pod {status.name_of(pod)} {words}", FAULT_CODE)
        raise self._deleted()

    def _deleted(self) -> LaunchError:
        return LaunchError(f"the {self.kind} {self.name} was deleted while it ran, or its pod was", ENDED_CODE)


class Shown:
    """The lines of a pod's log that have been shown. Each connection gives the log from its start, or, once the node
    has removed its oldest part, from a later one. A node's clock may be set back, and lines may have one time: so
    lines are counted, and times help only where the oldest lines are gone."""

    def __init__(self) -> None:
        self._first = self._last = b""
        self._count, self._newest = 0, ""

    def new(self, log: Iterable[bytes]) -> Iterator[bytes]:
        """The text of each line of `log` that was not shown before."""
        before, first = self._count, b""
        skips = before > 0
        for number, (raw, moment, text) in enumerate(filter(None, map(_stamped, log)), 1):
            first = first or raw
            if skips and first == self._first:
                skips = number < before
                continue
            if skips and (raw == self._last or moment < self._newest):
                skips = raw != self._last
                continue
            skips = False
            self._first, self._count, self._last, self._newest = first, number, raw, moment
            yield text


def _stamped(line: bytes) -> tuple[bytes, str, bytes] | None:
    """A line of a log, when it was printed, and its text."""
    stamp, space, text = line.partition(b" ")
    return (line, _moment(stamp.decode(errors="replace")), text) if space else None


def _moment(stamp: str) -> str:
    """A time such as 2026-11-26T19:00:00.5Z so that later ones compare as greater."""
    whole, _, part = stamp.rstrip("Z").partition(".")
    return f"{whole}.{part:0<9}"
