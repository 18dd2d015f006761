"""Hosts that are pods of Kubernetes, each with a bridge, which connects back to the launcher.

The launcher runs in a pod itself, that of a Job, unless --launcher-inside no says otherwise. It starts the pods by a
Job of their own, and both Jobs' objects go with the launcher's Job when that is deleted (ownerReferences).
    manifest   all objects, as values          api     requests to the API server, by the official client
    status     what pods say about themselves  hosts   in the launcher: the pods and their bridges
    queue      to submit a job, follow it and find it again
"""

from __future__ import annotations

from dmltrain_launch.clusters.launcher import IN_CLUSTER, Launcher, own_options
from dmltrain_launch.job.options import Options
from dmltrain_launch.job.options.option import FILE, choice, number, option, text


@own_options
class KubernetesOptions(Options):
    """The options of --launcher kubernetes."""

    image: str = option("IMAGE", "container image for all pods of the job", text("an image"), after="--launcher-inside")
    kube_namespace: str = option(
        "NAME", "namespace of Kubernetes (default: that of the kubeconfig's context)", text("a namespace")
    )
    kube_context: str = option(
        "NAME", "context of the kubeconfig file (default: the current one)", text("a context"), here=True
    )
    kube_template: str = option(
        "FILE",
        "YAML file with a pod's template: volumes, node selectors, tolerations and the like for all pods",
        text(FILE),
        here=True,
    )
    kube_pods: int = option(
        "N", "how many pods the processes are spread over (default: one for each worker)", number(int, 1), 0
    )
    kube_service_account: str = option(
        "NAME",
        "service account for the launcher's pod (default: a new one, which goes with the job)",
        text("a service account"),
    )
    kube_jobset: str = option(
        "auto|on|off",
        "make the job a JobSet, which was checked against schemas only, not with a controller (default: auto: if the "
        "cluster has JobSet and the job needs no replacement pods)",
        choice(("auto", "on", "off")),
        "auto",
        here=True,
    )


LAUNCHER = Launcher(
    "pods of Kubernetes",
    KubernetesOptions,
    IN_CLUSTER,
    cluster="hosts",
    queue="queue",
    undetached="its launcher runs in a pod; use --submit, which returns at once, and leave --detach out",
    inside=True,
)
