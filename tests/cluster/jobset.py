#!/usr/bin/env python3
"""JobSet for tests: the resource's schema, and a stand-in for its controller.

jobset.py SERVER TOKEN CA

The schema has the documented fields of jobset.x-k8s.io/v1alpha2, but for the Jobs inside, which have their own. The
stand-in makes the Jobs of each JobSet, in their order, with the documented names, labels and owners, and follows its
success and failure policies. It sets the documented defaults, so that a field that is left out does the same as with
the controller. Not there: restarts, Services, webhooks. Standard library only.
"""

import contextlib
import sys
import time
import urllib.error
from typing import Any

from tests.cluster.kubelet import Api, now

GROUP, VERSION = "jobset.x-k8s.io", "v1alpha2"
PATH = f"/apis/{GROUP}/{VERSION}"
JOBS = "/apis/batch/v1/namespaces"
LOOK_SECONDS = 0.2
TEXT, FLAG = {"type": "string"}, {"type": "boolean"}
NUMBER = {"type": "integer", "format": "int32"}
TEXTS = {"type": "array", "items": TEXT}


def _object(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, **({"required": list(required)} if required else {})}


def _one_of(*values: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(values)}


def _rows(of: dict[str, Any], key: str) -> dict[str, Any]:
    return {"type": "array", "items": of, "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}


ANY = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
REPLICATED = _object(
    ("name", "template"),
    name=TEXT,
    groupName=TEXT,
    template=_object(metadata=ANY, spec=ANY),
    replicas={**NUMBER, "default": 1},
    dependsOn=_rows(_object(("name", "status"), name=TEXT, status=_one_of("Ready", "Complete")), "name"),
)
RULE = _object(
    ("name", "action"),
    name=TEXT,
    action=_one_of("FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"),
    onJobFailureReasons=TEXTS,
    targetReplicatedJobs=TEXTS,
)
SPEC = _object(
    replicatedJobs=_rows(REPLICATED, "name"),
    network=_object(enableDNSHostnames=FLAG, subdomain=TEXT, publishNotReadyAddresses=FLAG),
    successPolicy=_object(("operator",), operator=_one_of("All", "Any"), targetReplicatedJobs=TEXTS),
    failurePolicy=_object(
        maxRestarts=NUMBER,
        restartStrategy={**_one_of("Recreate", "BlockingRecreate"), "default": "Recreate"},
        rules={"type": "array", "items": RULE},
    ),
    startupPolicy=_object(("startupPolicyOrder",), startupPolicyOrder=_one_of("AnyOrder", "InOrder")),
    suspend=FLAG,
    coordinator=_object(("replicatedJob",), replicatedJob=TEXT, jobIndex=NUMBER, podIndex=NUMBER),
    managedBy=TEXT,
    ttlSecondsAfterFinished={**NUMBER, "minimum": 0},
)
SCHEMA = _object(apiVersion=TEXT, kind=TEXT, metadata={"type": "object"}, spec=SPEC, status=ANY)
CRD = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": f"jobsets.{GROUP}"},
    "spec": {
        "group": GROUP,
        "scope": "Namespaced",
        "names": {"kind": "JobSet", "listKind": "JobSetList", "plural": "jobsets", "singular": "jobset"},
        "versions": [
            {
                "name": VERSION,
                "served": True,
                "storage": True,
                "schema": {"openAPIV3Schema": SCHEMA},
                "subresources": {"status": {}},
            }
        ],
    },
}


class Controller:
    def __init__(self, api: Api):
        self.api = api

    def run(self) -> None:
        while True:
            with contextlib.suppress(OSError):  # the API server is away, or the resource is
                for found in self.api.call("GET", f"{PATH}/jobsets")["items"]:
                    if "deletionTimestamp" not in found["metadata"]:
                        self.look(found)
            time.sleep(LOOK_SECONDS)

    def look(self, found: Any) -> None:
        """Make the Jobs that are to be there, or end all when one has failed or those of the success policy are over.
        The Jobs are deleted by the garbage collector when the JobSet is."""
        spec, meta = found["spec"], found["metadata"]
        if spec.get("suspend") or found.get("status", {}).get("terminalState"):
            return
        mine = f"{JOBS}/{meta['namespace']}/jobs"
        query = f"?labelSelector=jobset.sigs.k8s.io%2Fjobset-name%3D{meta['name']}"
        jobs = {each["metadata"]["name"]: each for each in self.api.call("GET", mine + query)["items"]}
        by_name: dict[str, list[Any]] = {}
        for row in spec["replicatedJobs"]:
            names = [f"{meta['name']}-{row['name']}-{index}" for index in range(row["replicas"])]
            if all(_is_ready(each) for name in _awaited(row) for each in by_name[name]):
                for index, name in enumerate(names):
                    if name not in jobs:
                        jobs[name] = self.api.call("POST", mine, _job(found, row, name, index))
            by_name[row["name"]] = [jobs[name] for name in names if name in jobs]
        targets = spec.get("successPolicy", {}).get("targetReplicatedJobs") or list(by_name)
        if any(_has(job, "Failed") for job in jobs.values()):
            self._end(found, "Failed", jobs)
        elif all(by_name[name] and all(_has(each, "Complete") for each in by_name[name]) for name in targets):
            self._end(found, "Completed", jobs)

    def _end(self, found: Any, how: str, jobs: dict[str, Any]) -> None:
        """Delete the Jobs that still run; those that are over stay."""
        meta = found["metadata"]
        condition = {"type": how, "status": "True", "reason": how, "message": "", "lastTransitionTime": now()}
        path = f"{PATH}/namespaces/{meta['namespace']}/jobsets/{meta['name']}/status"
        status = {"status": {"terminalState": how, "conditions": [condition]}}
        self.api.call("PATCH", path, status, "application/merge-patch+json")
        for name, job in jobs.items():
            if not (_has(job, "Complete") or _has(job, "Failed")):
                with contextlib.suppress(urllib.error.HTTPError):
                    where = f"{JOBS}/{meta['namespace']}/jobs/{name}"
                    self.api.call("DELETE", where, {"propagationPolicy": "Background"})


def _awaited(row: Any) -> list[str]:
    return [each["name"] for each in row.get("dependsOn", ())]


def _is_ready(job: Any) -> bool:
    """As far as Kubernetes 1.20 says it: all pods are there or are over."""
    status = job.get("status", {})
    return sum(status.get(key, 0) for key in ("active", "succeeded", "failed")) >= job["spec"].get("parallelism", 1)


def _has(job: Any, kind: str) -> bool:
    conditions = job.get("status", {}).get("conditions", ())
    return any(condition["type"] == kind and condition["status"] == "True" for condition in conditions)


def _job(found: Any, row: Any, name: str, index: int) -> Any:
    """What it looks like with the defaults of JobSet's webhook: pods are numbered, unless the template sets another
    completionMode."""
    meta, template = found["metadata"], row["template"]
    own = {"jobset-name": meta["name"], "replicatedjob-name": row["name"], "job-index": str(index)}
    labels = {f"jobset.sigs.k8s.io/{key}": value for key, value in own.items()}
    owner = {"apiVersion": f"{GROUP}/{VERSION}", "kind": "JobSet", "name": meta["name"], "uid": meta["uid"]}
    metadata = {"name": name, "labels": {**template.get("metadata", {}).get("labels", {}), **labels}}
    metadata["ownerReferences"] = [{**owner, "controller": True, "blockOwnerDeletion": True}]
    spec = {"completionMode": "Indexed", **template["spec"]}
    if spec["completionMode"] == "Indexed" and not spec.get("completions"):
        raise ValueError(f"{name}: spec.completions: Required value: when completion mode is Indexed")
    pods = spec["template"]
    spec["template"] = {**pods, "metadata": {**pods["metadata"], "labels": {**pods["metadata"]["labels"], **labels}}}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}


if __name__ == "__main__":
    Controller(Api(*sys.argv[1:])).run()
