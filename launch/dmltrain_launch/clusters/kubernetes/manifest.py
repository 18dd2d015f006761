"""The objects of a job as values, as Kubernetes' API takes them. Pure, but for reading --kube-template.

    Job NAME                the launcher's pod                      \
    ServiceAccount, Role, RoleBinding NAME   what that pod may do   | made by the command that submits the job
    ConfigMap NAME          the next Job, for the launcher          |
    ConfigMap NAME-code     the files of --sync-dst-dir, if given    |
    Secret NAME-environment variables of --secret, if any           /
    Job NAME-hosts          a pod for each host of the job          \\ made by the launcher
    Secret NAME-hosts       how a bridge finds the launcher: address, certificate, token /

A pod that is lost is replaced by the Job, and takes the place of the lost one when its bridge calls.

With --kube-jobset both Jobs are in one object, a JobSet, which the command makes:
    JobSet NAME             Job NAME-launcher-0 and, when the pod of that is ready, Job NAME-hosts-0
It has succeeded when the launcher's Job has, and has failed when a Job has; then its other pods are deleted. The
launcher makes its Secret only, and the hosts' pods start when that is there.
"""

from __future__ import annotations

import base64
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dmltrain_launch import LaunchError
from dmltrain_launch.channels.bridges.bridge import VARIABLE
from dmltrain_launch.channels.bridges.engine import bridge_program
from dmltrain_launch.clusters.kubernetes import KubernetesOptions, code
from dmltrain_launch.clusters.queue import FOLLOWED, SUBMITTED, engine_name, here, secret_settings
from dmltrain_launch.clusters.share import share
from dmltrain_launch.job.options import Options
from dmltrain_launch.own_program import own_program
from dmltrain_launch.secret import COMMON

Object = dict[str, Any]
HOSTS_VARIABLE = "DMLTRAIN_KUBERNETES"  # of the launcher's pod: the Job for its hosts, as YAML
POD_VARIABLE = "DMLTRAIN_POD"  # the pod's name
LABEL, PART = "dmltrain/job", "dmltrain/part"
LAUNCHER, HOSTS = "launcher", "hosts"
LAUNCH = own_program("python3", "dmltrain_launch.cli")
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
JOBSET_LABEL = "jobset.sigs.k8s.io/jobset-name"  # of each Job of a JobSet
API_OF = {"Job": "batch/v1", "JobSet": "jobset.x-k8s.io/v1alpha2"}
GPU = "nvidia.com/gpu"
MOST_NAME = 63 - len("-hosts-") - 5  # a pod's name is its host name
KEPT_SECONDS = 86_400  # a job that has ended and that nobody follows
POD_LOGS = "/tmp/dmltrain-logs"
LOST_PODS = 1000  # that are replaced
PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
JOINED = ("env", "volumes", "volumeMounts", PREFERRED)  # lists of a pod that have the user's rows and ours


@dataclass(frozen=True)
class Described:
    """A job as Kubernetes has it. `words`: the command line of its launcher. `environment` and `secrets`: variables of
    this machine that the launcher needs. `files`: an archive of its folder. `kind`: of the object that is the job, Job
    or JobSet."""

    name: str
    namespace: str
    options: KubernetesOptions
    template: Object
    words: tuple[str, ...] = ()
    environment: Mapping[str, str] | None = None
    secrets: Mapping[str, str] | None = None
    files: bytes = b""
    kind: str = "Job"

    @property
    def account(self) -> str:
        return self.options.kube_service_account or self.name

    @property
    def pods(self) -> int:
        return self.options.kube_pods or self.options.num_workers or 1


def described(
    name: str,
    namespace: str,
    options: KubernetesOptions,
    words: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> Described:
    """LaunchError if something is missing or is not what Kubernetes accepts."""
    if not options.image:
        raise LaunchError(
            "--image is missing: the container image for all pods of the job, such as --image "
            "registry/name:tag; examples/kubernetes/Dockerfile makes one"
        )
    plain, secrets = _variables(options, environ or {})
    for variable, value in secrets.items():
        if not COMMON.fullmatch(value) and any(value in word for word in words):
            raise LaunchError(
                f"the command line has the value of {variable}, which may be secret, and who may list pods would see "
                f"it: let the program read {variable} from its environment"
            )
    return Described(
        kubernetes_name(name, exact=bool(options.job)),
        namespace,
        options,
        _template(options.kube_template),
        tuple(words),
        plain,
        secrets,
    )


def kubernetes_name(name: str, exact: bool) -> str:
    """The name of the job for Kubernetes. `exact`: the user has chosen it, so it is not changed, but refused."""

    def cut(made: str) -> str:
        return made if len(made) <= MOST_NAME else made[: MOST_NAME - 16].rstrip("-") + made[-16:]

    return engine_name("Kubernetes", name, exact, MOST_NAME, cut)


def _variables(options: Options, environ: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """The variables of this machine that the job gets, plain and secret."""
    for setting in secret_settings(options):
        if environ.get(setting.name) != setting.value:
            raise LaunchError(
                f"--env {setting.name}=...: who may read the Job would see the value; set {setting.name} in this "
                f"command's environment, and use --secret {setting.name}"
            )
    secrets = {setting.name: setting.value for setting in secret_settings(options)}
    return {name: value for name, value in here(options, environ).items() if name not in secrets}, secrets


def _template(path: str) -> Object:
    """The pod template in the file of --kube-template: `metadata` and `spec`, as in a Pod or a Job's `template`."""
    if not path:
        return {}
    try:
        template = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise LaunchError(f"--kube-template {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise LaunchError(f"--kube-template {path}: invalid YAML: {str(error).splitlines()[0]}") from None
    template = (
        {key: template[key] for key in ("metadata", "spec") if key in template} if isinstance(template, dict) else None
    )
    containers = (template.get("spec") or {}).get("containers", []) if template else None
    if (
        not template
        or not isinstance(containers, list)
        or not all(isinstance(container, dict) for container in containers)
    ):
        raise LaunchError(f"--kube-template {path}: expected a pod's template, with spec: and in it containers:")
    return template


def labels(job: Described, part: str) -> Object:
    return {"app.kubernetes.io/managed-by": "dmltrain", LABEL: job.name, PART: part}


def _object(job: Described, kind: str, api: str = "v1", part: str = LAUNCHER, suffix: str = "", **more: Any) -> Object:
    metadata = {"name": job.name + suffix, "namespace": job.namespace, "labels": labels(job, part)}
    return {"apiVersion": api, "kind": kind, "metadata": metadata, **more}


def submitted(job: Described) -> list[Object]:
    """All objects that the command makes, the one that is the job last; its Secret is not among them."""
    inner = in_jobset(hosts_job(job)) if job.kind == "JobSet" else hosts_job(job)
    config = _object(job, "ConfigMap", data={"hosts.yaml": text([inner])})
    files = {code.KEY: base64.b64encode(job.files).decode()}
    more = [_object(job, "ConfigMap", suffix="-code", binaryData=files)] if job.files else []
    return [*([] if job.options.kube_service_account else account(job)), config, *more, whole(job)]


def whole(job: Described) -> Object:
    """The object that is the job: what else there is belongs to it."""
    return jobset(job) if job.kind == "JobSet" else launcher_job(job)


def no_jobset(options: Options) -> str:
    """Why this job cannot be a JobSet; "" if it can."""
    named = {"--elastic": options.elastic, "--max-restarts": options.max_restarts}
    needs = next((name for name, given in named.items() if given), "")
    return f"{needs} needs pods that replace lost ones, which was tested with plain Jobs only" if needs else ""


def jobset(job: Described) -> Object:
    """Both Jobs. Without `completionMode` JobSet would number the pods, which Jobs without `completions` do not."""
    launcher, hosts = launcher_job(job), hosts_job(job)
    kept = launcher["spec"].pop("ttlSecondsAfterFinished")
    ready = {"name": LAUNCHER, "status": "Ready"}
    jobs = [_replicated(LAUNCHER, launcher), {**_replicated(HOSTS, hosts), "dependsOn": [ready]}]
    spec = {
        "replicatedJobs": jobs,
        "network": {"enableDNSHostnames": False},
        "successPolicy": {"operator": "All", "targetReplicatedJobs": [LAUNCHER]},
        "failurePolicy": {"maxRestarts": 0},
        "ttlSecondsAfterFinished": kept,
    }
    return _queued(job, _object(job, "JobSet", API_OF["JobSet"], spec=spec))


def _replicated(name: str, job: Object) -> Object:
    metadata = {"labels": {key: value for key, value in job["metadata"]["labels"].items() if key != QUEUE_LABEL}}
    template = {"metadata": metadata, "spec": {"completionMode": "NonIndexed", **job["spec"]}}
    return {"name": name, "replicas": 1, "template": template}


def in_jobset(hosts: Object) -> Object:
    """The Job of the hosts as JobSet makes it, for the launcher, which only has to find it."""
    metadata = hosts["metadata"]
    name = metadata["labels"][LABEL]
    labels = {**metadata["labels"], JOBSET_LABEL: name}
    return {**hosts, "metadata": {**metadata, "name": f"{name}-{HOSTS}-0", "labels": labels}}


def _queued(job: Described, manifest: Object) -> Object:
    if job.options.queue:
        manifest["metadata"]["labels"][QUEUE_LABEL] = job.options.queue
    return manifest


def launcher_job(job: Described) -> Object:
    variables: list[Object] = [
        {"name": name, "value": value} for name, value in sorted((job.environment or {}).items())
    ]
    for name in sorted(job.secrets or ()):
        source = {"name": f"{job.name}-environment", "key": name}
        variables.append({"name": name, "valueFrom": {"secretKeyRef": source}})
    config = {"configMapKeyRef": {"name": job.name, "key": "hosts.yaml"}}
    container = {
        "name": LAUNCHER,
        "image": job.options.image,
        "command": LAUNCH,
        "args": ["--job", job.name, "--log-dir", f"{POD_LOGS}/{job.name}", *job.words],
        "env": [
            {"name": SUBMITTED, "value": FOLLOWED},
            {"name": HOSTS_VARIABLE, "valueFrom": config},
            {"name": POD_VARIABLE, "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
            {"name": "PYTHONUNBUFFERED", "value": "1"},
            *variables,
        ],
        "resources": {"requests": {"cpu": "250m", "memory": "256Mi"}},
    }
    spec: Object = {"serviceAccountName": job.account, "restartPolicy": "Never", "containers": [container]}
    if job.files:
        spec["volumes"] = [{"name": "code", "configMap": {"name": f"{job.name}-code"}}]
        container["volumeMounts"] = [{"name": "code", "mountPath": code.MOUNTED}]
        container["command"] = ["/bin/sh", "-c", f'{code.UNPACK} && exec {shlex.join(LAUNCH)} "$@"', LAUNCHER]
    template = _merged(job.template, {"metadata": {"labels": labels(job, LAUNCHER)}, "spec": spec}, ("resources",))
    jobs_spec = {"parallelism": 1, "backoffLimit": 0, "ttlSecondsAfterFinished": KEPT_SECONDS, "template": template}
    return _object(job, "Job", API_OF["Job"], spec=jobs_spec)


def hosts_job(job: Described) -> Object:
    """A pod for each host. Without `completions` it is over when one pod has exited with 0, and as long as none has, a
    lost pod is replaced."""
    secret = {"secretKeyRef": {"name": f"{job.name}-{HOSTS}", "key": "bridge"}}
    container = {
        "name": "host",
        "image": job.options.image,
        "command": ["/bin/sh", "-c", f"trap '' USR1; exec python3 {bridge_program('0')}"],
        "env": [{"name": VARIABLE, "valueFrom": secret}],
        "resources": resources(job),
    }
    spec: Object = {"restartPolicy": "Never", "automountServiceAccountToken": False, "affinity": _apart(job)}
    spec["containers"] = [container]
    template = _merged(job.template, {"metadata": {"labels": labels(job, HOSTS)}, "spec": spec})
    jobs_spec = {"parallelism": job.pods, "backoffLimit": LOST_PODS, "template": template}
    return _queued(job, _object(job, "Job", API_OF["Job"], HOSTS, f"-{HOSTS}", spec=jobs_spec))


def _apart(job: Described) -> Object:
    """Rather on nodes that have no pod of the job yet."""
    others = {"matchLabels": {LABEL: job.name, PART: HOSTS}}
    term = {"labelSelector": others, "topologyKey": "kubernetes.io/hostname"}
    return {"podAntiAffinity": {PREFERRED: [{"weight": 100, "podAffinityTerm": term}]}}


def resources(job: Described) -> Object:
    """What a pod asks for."""
    host = share(job.options, job.pods, cores_of_worker=0)
    requests = {"cpu": str(host.cpus)} if host.cpus else {}
    requests |= {"memory": f"{host.memory}Mi"} if host.memory else {}
    resources_of_pod: Object = {"requests": requests} if requests else {}
    return resources_of_pod | ({"limits": {GPU: str(host.gpus)}} if host.gpus else {})


def secret_name(hosts: Object) -> str:
    """Of what tells bridges where their launcher is."""
    return f"{hosts['metadata']['labels'][LABEL]}-{HOSTS}"


def hosts_secret(hosts: Object, settings: str) -> Object:
    metadata = {**hosts["metadata"], "name": secret_name(hosts)}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": {"bridge": settings}}


def environment_secret(job: Described) -> list[Object]:
    if not job.secrets:
        return []
    return [_object(job, "Secret", suffix="-environment", stringData=dict(job.secrets))]


def account(job: Described) -> list[Object]:
    """What the launcher's pod may do: make its own Secret and Job (of a JobSet: the Secret), delete that one, and see
    pods and events."""
    batch, core = ["batch"], [""]
    rules: list[Object] = [
        {"apiGroups": core, "resources": ["pods", "events"], "verbs": ["list"]},
        {"apiGroups": core, "resources": ["secrets"], "verbs": ["create"]},
    ]
    jobs: list[Object] = [
        {"apiGroups": batch, "resources": ["jobs"], "verbs": ["create"]},
        {"apiGroups": batch, "resources": ["jobs"], "resourceNames": [f"{job.name}-{HOSTS}"], "verbs": ["delete"]},
    ]
    group = "rbac.authorization.k8s.io"
    subject = {"kind": "ServiceAccount", "name": job.name, "namespace": job.namespace}
    role = {"apiGroup": group, "kind": "Role", "name": job.name}
    return [
        _object(job, "ServiceAccount"),
        _object(job, "Role", f"{group}/v1", rules=rules if job.kind == "JobSet" else rules + jobs),
        _object(job, "RoleBinding", f"{group}/v1", subjects=[subject], roleRef=role),
    ]


def owned(manifest: Object, owner: Mapping[str, Any] | None, kind: str = "Job") -> Object:
    """The object, which is deleted with `owner`, the launcher's Job, or a JobSet."""
    if not owner:
        return manifest
    reference = {"apiVersion": API_OF[kind], "kind": kind, "name": owner["name"], "uid": owner["uid"]}
    return {**manifest, "metadata": {**manifest["metadata"], "ownerReferences": [reference]}}


def _merged(template: Object, ours: Object, left_out: Sequence[str] = ()) -> Object:
    """The user's pod template with what is ours. Our container is its first one, without what is `left_out` there."""
    spec = {**(template.get("spec") or {})}
    first, *others = spec.pop("containers", None) or [{}]
    first = {key: value for key, value in first.items() if key not in left_out}
    merged = _deep({"metadata": template.get("metadata") or {}, "spec": spec}, ours)
    container = _deep(first, ours["spec"]["containers"][0])
    merged["spec"]["containers"] = [container, *others]
    return merged


def _deep(under: Object, over: Object) -> Object:
    both = {**under, **over}
    for key in under.keys() & over.keys():
        if isinstance(under[key], dict) and isinstance(over[key], dict):
            both[key] = _deep(under[key], over[key])
        elif key in JOINED:
            both[key] = [*under[key], *over[key]]
    return both


class _Dumper(yaml.SafeDumper):
    """YAML for readers: no aliases, and text of several lines as such."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_representer(
    str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, "|" if "\n" in text else None)
)


def text(objects: Sequence[Object]) -> str:
    return yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, width=1000)
