"""Hosts that are pods of Kubernetes, each with a bridge, which connects back to the launcher.

The launcher runs in a pod itself, that of a Job, unless --launcher-inside no says otherwise. It starts the pods by a
Job of their own, and both Jobs' objects go with the launcher's Job when that is deleted (ownerReferences).
    manifest   all objects, as values          api     requests to the API server, by the official client
    status     what pods say about themselves  hosts   in the launcher: the pods and their bridges
    queue      to submit a job, follow it and find it again
"""

from dmltrain_launch.clusters.kubernetes.hosts import Cluster
from dmltrain_launch.clusters.kubernetes.queue import Queue

__all__ = ["Cluster", "Queue"]
