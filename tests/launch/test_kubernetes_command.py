"""The objects of a job under --launcher kubernetes, and what is read from pods, without Kubernetes."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from dmltrain_launch import LaunchError
from dmltrain_launch.clusters import AllOptions
from dmltrain_launch.clusters.kubernetes import api, manifest, status
from dmltrain_launch.clusters.kubernetes.queue import Held, Queue, Shown
from dmltrain_launch.clusters.kubernetes.queue import _kind as queue_kind
from dmltrain_launch.clusters.queue import Inside, Waiting
from dmltrain_launch.command_line.options import parse, words_inside
from tests.cluster.jobset import SCHEMA

PLAIN = ["--launcher", "kubernetes", "--image", "registry/me/train:1", "-n", "4"]


def described(*words: str, template: str = "", **environ: str) -> manifest.Described:
    options = replace(parse([*PLAIN, *words, "true"], environ), kube_template=template)
    return manifest.described("cifar10", "lab", options, words_inside(["true"], {}, "kubernetes"), environ)


def container(job: manifest.Object) -> manifest.Object:
    return job["spec"]["template"]["spec"]["containers"][0]


@pytest.mark.parametrize("words", ["", "--queue gpus --worker-gpus 2", "--kube-service-account mine"])
def test_every_object_is_what_kubernetes_takes(words: str):
    validate = pytest.importorskip("kubernetes_validate").validate
    more = "--worker-memory 1g --secret KEY"
    job = described(*words.split(), *more.split(), KEY="value", OMP_NUM_THREADS="2")
    secret = manifest.hosts_secret(manifest.hosts_job(job), "{}")
    made = [*manifest.submitted(job), manifest.hosts_job(job), secret, *manifest.environment_secret(job)]
    for each in made:
        owned = manifest.owned(each, {"name": "cifar10", "uid": "1-2"})
        validate(owned, "1.29", strict=True)
        assert owned["metadata"]["labels"][manifest.LABEL] == "cifar10"
    assert ("Role" in {each["kind"] for each in made}) == ("--kube-service-account" not in words)


def strict(schema: manifest.Object) -> manifest.Object:
    """The schema, which then takes no other fields than those that it names."""
    made = {**schema, "properties": {key: strict(each) for key, each in schema.get("properties", {}).items()}}
    if "items" in made:
        made["items"] = strict(made["items"])
    if made["type"] == "object" and made["properties"]:
        made["additionalProperties"] = False
    return made


@pytest.mark.parametrize("words", [(), ("--queue", "gpus", "--worker-gpus", "2", "--secret", "KEY")])
def test_a_jobset_is_what_its_documented_fields_allow(words: tuple[str, ...]):
    check = pytest.importorskip("jsonschema").validate
    validate = pytest.importorskip("kubernetes_validate").validate
    job = replace(described(*words, KEY="value"), kind="JobSet")
    *others, made = manifest.submitted(job)
    check(made, strict(SCHEMA))
    assert (made["apiVersion"], made["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert made["metadata"]["labels"].get(manifest.QUEUE_LABEL) == ("gpus" if words else None)
    launcher, hosts = made["spec"]["replicatedJobs"]
    assert made["spec"]["successPolicy"]["targetReplicatedJobs"] == [launcher["name"]]
    assert hosts["dependsOn"] == [{"name": launcher["name"], "status": "Ready"}]
    for each in (launcher, hosts):
        inner = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, **each["template"]}
        validate(inner, "1.29", strict=True)
        assert "ttlSecondsAfterFinished" not in each["template"]["spec"], "only the whole is deleted"
        assert each["template"]["spec"]["completionMode"] == "NonIndexed", "by default JobSet numbers the pods"
        assert manifest.QUEUE_LABEL not in each["template"]["metadata"]["labels"], "Kueue has the whole in its queue"
    (config,) = (other for other in others if other["kind"] == "ConfigMap")
    known = yaml.safe_load(config["data"]["hosts.yaml"])
    assert known["metadata"]["name"] == f"cifar10-{hosts['name']}-0"
    wanted = container({"spec": hosts["template"]["spec"]})["env"][0]["valueFrom"]["secretKeyRef"]["name"]
    assert manifest.hosts_secret(known, "{}")["metadata"]["name"] == wanted
    (role,) = (other for other in others if other["kind"] == "Role")
    assert [rule["resources"] for rule in role["rules"]] == [["pods", "events"], ["secrets"]]
    validate(manifest.owned(role, {"name": "cifar10", "uid": "1-2"}, "JobSet"), "1.29", strict=True)


class Served:
    """An API server with or without JobSet, where all or nothing is allowed."""

    namespace = "lab"

    def __init__(self, served: bool, allowed: bool = True):
        self.served, self.allowed = served, allowed

    def serves(self, kind: str) -> bool:
        return self.served

    def allows(self, kind: str, *verbs: str) -> bool:
        return self.allowed


def test_a_job_is_a_jobset_where_that_is_there_and_can_do_all_that_the_job_needs(tmp_path: Path):
    def kind(words: str = "", **has: bool) -> str:
        options = parse([*PLAIN, *words.split(), "true"], {})
        return queue_kind(Inside(options, (), "a", tmp_path), Served(**has) if has else None)

    assert kind(served=True) == "JobSet" and kind(served=False) == "Job"
    assert kind(served=True, allowed=False) == "Job", "a user who may make Jobs only"
    assert kind("--elastic", served=True) == kind("--max-restarts 1", served=True) == "Job"
    assert kind("--kube-jobset off", served=True) == kind() == "Job"
    assert kind("--kube-jobset on") == "JobSet", "--dry-run asks no cluster"
    with pytest.raises(LaunchError, match="no JobSet .jobset.x-k8s.io/v1alpha2"):
        kind("--kube-jobset on", served=False)
    with pytest.raises(LaunchError, match="--kube-jobset on: --elastic needs pods"):
        kind("--kube-jobset on --elastic")
    lines = Queue().artefact(Inside(parse([*PLAIN, "--kube-jobset", "on", "true"], {}), (), "a", tmp_path))
    assert [each["kind"] for each in yaml.safe_load_all("\n".join(lines))][-1] == "JobSet"
    assert any("kubectl delete jobset,configmap" in line for line in lines)


def test_a_job_in_the_log_folder_of_an_earlier_version_is_a_job(tmp_path: Path):
    record = {"kubernetes_job": "a", "kube_namespace": "b"}
    for kind in ({}, {"kubernetes_kind": "JobSet"}):
        assert Queue().held({**record, **kind}, tmp_path).kind == kind.get("kubernetes_kind", "Job")
    with pytest.raises(LaunchError, match="'Pod': expected Job or JobSet"):
        Queue().held({**record, "kubernetes_kind": "Pod"}, tmp_path)


def test_the_state_of_a_jobset():
    def state(*conditions: str, **spec: object) -> str:
        made = [{"type": condition, "status": "True", "message": "why"} for condition in conditions]
        job = {"spec": spec, "status": {"conditions": made}}
        return f"{status.job_state(job)}, {status.job_lives(job)}"

    assert state("StartupPolicyCompleted") == "is there, True"
    assert state("Suspended", suspend=True) == "is suspended, as Kueue does until its queue has room, True"
    assert state("Completed") == "has ended, False" and state("Failed") == "has failed (why), False"


def test_pods_ask_for_what_their_processes_need():
    words = "--kube-pods 2 -s 2 --worker-cores 3 --server-cores 1 --worker-memory 4g --server-memory 512m"
    made = manifest.hosts_job(described(*words.split(), "--worker-gpus", "2"))
    assert made["spec"]["parallelism"] == 2
    wanted = {"requests": {"cpu": "7", "memory": "8704Mi"}, "limits": {"nvidia.com/gpu": "4"}}
    assert container(made)["resources"] == wanted
    plain = manifest.hosts_job(described())
    assert plain["spec"]["parallelism"] == 4 and container(plain)["resources"] == {}, "a pod for each worker"


def test_the_template_of_the_user_is_below_what_is_ours(tmp_path: Path):
    file = tmp_path / "pod.yaml"
    text = """
        spec:
          nodeSelector: {disk: fast}
          affinity: {podAntiAffinity: {preferredDuringSchedulingIgnoredDuringExecution: [{weight: 1}]}}
          restartPolicy: Always
          volumes: [{name: data, hostPath: {path: /data}}]
          containers:
          - image: other
            volumeMounts: [{name: data, mountPath: /data}]
            env: [{name: A, value: "1"}]
            resources: {limits: {nvidia.com/gpu: 1}}
          - {name: beside, image: proxy}
    """
    file.write_text(text)
    job = described(template=str(file))
    launcher, hosts = manifest.launcher_job(job), manifest.hosts_job(job)
    for made in (launcher, hosts):
        spec = made["spec"]["template"]["spec"]
        assert (spec["nodeSelector"], spec["restartPolicy"], len(spec["volumes"])) == ({"disk": "fast"}, "Never", 1)
        assert (container(made)["image"], container(made)["env"][0]["name"]) == ("registry/me/train:1", "A")
        assert container(made)["volumeMounts"] and spec["containers"][1]["name"] == "beside"
    near = hosts["spec"]["template"]["spec"]["affinity"]["podAntiAffinity"][manifest.PREFERRED]
    assert [each["weight"] for each in near] == [1, 100]
    assert container(hosts)["resources"] == {"limits": {"nvidia.com/gpu": 1}}
    assert "limits" not in container(launcher)["resources"], "the launcher needs no GPU"
    for wrong, words in (("a: [", "invalid YAML"), ("a: 1", "expected a pod's template"), (None, "No such file")):
        if wrong is None:
            file.unlink()
        else:
            file.write_text(wrong)
        with pytest.raises(LaunchError, match=f"--kube-template .*: {words}"):
            described(template=str(file))


@pytest.mark.parametrize("name", ["Two Words", "train_cifar", "-a", "a-", "9lives", "x" * 52])
def test_a_name_that_kubernetes_does_not_accept_is_refused_with_one_that_it_does(name: str):
    with pytest.raises(LaunchError, match="use --job ([-a-z0-9]+)$") as caught:
        manifest.kubernetes_name(name, exact=True)
    better = str(caught.value).rpartition(" ")[2]
    assert manifest.kubernetes_name(better, exact=True) == better
    assert manifest.kubernetes_name(name, exact=False) == better
    made = manifest.kubernetes_name(f"{name}_a_very_long_name_of_a_program_" * 3 + "-20261126-190000", exact=False)
    assert len(made) <= manifest.MOST_NAME and made.endswith("-20261126-190000"), "a generated name keeps its date"


def test_secrets_are_in_a_secret_and_nowhere_else(tmp_path: Path):
    words = [*PLAIN, "--secret", "API_KEY", "--env", "SEED", "true"]
    environ = {"API_KEY": "hunter2", "SEED": "5", "PYTHONPATH": "/here", "OMP_NUM_THREADS": "3"}
    job = manifest.described("a", "b", parse(words, environ), words_inside(words, environ, "kubernetes"), environ)
    assert "hunter2" not in manifest.text(manifest.submitted(job))
    assert manifest.environment_secret(job)[0]["stringData"] == {"API_KEY": "hunter2"}
    variables = {each["name"]: each for each in container(manifest.launcher_job(job))["env"]}
    assert variables["API_KEY"]["valueFrom"]["secretKeyRef"] == {"name": "a-environment", "key": "API_KEY"}
    assert variables["SEED"]["value"] == "5" and "PYTHONPATH" not in variables
    with pytest.raises(LaunchError, match="--env TOKEN=.* use --secret TOKEN"):
        described("--env", "TOKEN=abc")


@pytest.mark.parametrize("given", ["--env=TOKEN=hunter2", "--env-worker=TOKEN=hunter2", "--env=TOKEN:hunter2"])
def test_a_secret_that_the_shell_has_put_into_the_command_line_is_in_no_pods_words(given: str):
    words, environ = [*PLAIN, given, "true"], {"TOKEN": "hunter2"}
    job = manifest.described("a", "b", parse(words, environ), words_inside(words, environ, "kubernetes"), environ)
    assert "hunter2" not in manifest.text(manifest.submitted(job)) and "TOKEN" in job.words
    assert manifest.environment_secret(job)[0]["stringData"] == {"TOKEN": "hunter2"}


def test_a_secret_in_the_programs_words_is_refused():
    words, environ = [*PLAIN, "--secret", "TOKEN", "train", "--login=hunter2"], {"TOKEN": "hunter2"}
    with pytest.raises(LaunchError, match="has the value of TOKEN"):
        manifest.described("a", "b", parse(words, environ), words_inside(words, environ, "kubernetes"), environ)


def log(*times: int) -> list[bytes]:
    return [f"2026-01-01T18:00:{time:02d}.5Z line {number}".encode() for number, time in enumerate(times)]


SET_BACK = log(30, 31, 31, 4, 5, 5, 40, 41)


@pytest.mark.parametrize("first", range(9))
@pytest.mark.parametrize("second", range(9))
def test_every_line_of_a_pods_log_is_shown_once_whatever_the_nodes_clock_says(first: int, second: int):
    """Connections end after so many lines; each begins with the log's first line."""
    shown = Shown()
    got = [*shown.new(SET_BACK[:first]), *shown.new(SET_BACK[:second]), *shown.new(SET_BACK)]
    assert got == [f"line {number}".encode() for number in range(8)]


@pytest.mark.parametrize("removed", range(6))
def test_of_a_log_whose_oldest_lines_the_node_has_removed_all_later_ones_are_shown(removed: int):
    shown, lines = Shown(), log(10, 11, 12, 12, 13, 13, 14, 15)
    got = [*shown.new(lines[:5]), *shown.new(lines[removed:7]), *shown.new(lines[removed:])]
    assert got == [f"line {number}".encode() for number in range(8) if number < 5 or number >= removed]


def test_the_dry_run_says_how_to_make_the_secrets(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("API_KEY", "hunter2")
    options = parse([*PLAIN, "--secret", "API_KEY", "--job", "night", "true"], {"API_KEY": "hunter2"})
    lines = Queue().artefact(Inside(options, (), "night", tmp_path, ("true",)))
    assert "hunter2" not in "\n".join(lines)
    secret = 'kubectl create secret generic night-environment --namespace=default --from-literal=API_KEY="$API_KEY"'
    assert any(secret in line for line in lines)
    kinds = [each["kind"] for each in yaml.safe_load_all("\n".join(lines))]
    assert kinds == ["ServiceAccount", "Role", "RoleBinding", "ConfigMap", "Job"]


def test_the_launchers_pod_gets_the_command_line_without_what_is_for_this_machine(tmp_path: Path):
    file = tmp_path / "job.yaml"
    file.write_text("num-workers: 2\nimage: some\n")
    argv = ["--config", str(file), *["--kube-template", "x", "--submit", "--quiet", "--grace=3", "train.py", "--quiet"]]
    expected = "--launcher kubernetes --num-workers 2 --image some --grace 3 -- train.py --quiet"
    assert " ".join(words_inside(argv, {}, "kubernetes")) == expected


def test_an_image_is_needed_and_may_be_that_of_dmlcs_workers():
    with pytest.raises(LaunchError, match="--image is missing"):
        manifest.described("a", "b", AllOptions(num_workers=1))
    assert parse(["--kube-worker-image", "x", *PLAIN[:2], "true"], {}).image == "x"


def pod(phase: str = "Pending", **states: object) -> status.Found:
    container = [{"state": states}] if states else []
    return {"metadata": {"name": "p"}, "status": {"phase": phase, "containerStatuses": container}}


def test_what_a_job_waits_for():
    unscheduled = pod()
    words = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/5 nodes: no cpu"}
    unscheduled["status"]["conditions"] = [words]
    creating = pod(waiting={"reason": "ContainerCreating"})
    said = status.why_waiting([unscheduled, creating, pod("Running")], 4, "pods")
    assert said == "waiting for 3 of 4 pods: Unschedulable: 0/5 nodes: no cpu"
    assert status.why_waiting([pod("Running")], 1, "pods") == ""
    pulled = pod(waiting={"reason": "ErrImagePull", "message": "not found"})
    assert status.image_problem([pulled], patient=False) == "p: ErrImagePull: not found"
    assert status.image_problem([pulled], patient=True) == ""
    assert status.image_problem([pod(waiting={"reason": "InvalidImageName"})], patient=True) == "p: InvalidImageName"
    told = pod(waiting={"reason": "CreateContainerConfigError", "message": 'secret "a-hosts" not found'})
    assert status.waits_for_secret(told, "a-hosts") and not status.waits_for_secret(told, "hosts")


def test_how_a_pod_has_ended():
    killed = pod("Failed", terminated={"exitCode": 137, "reason": "OOMKilled"})
    assert status.fate(killed) == "exited with 137 (OOMKilled)"
    evicted = pod("Failed")
    evicted["status"] |= {"reason": "Evicted", "message": "low on memory"}
    assert status.fate(evicted) == "Evicted: low on memory"
    assert status.fate(pod("Running")) == ""
    assert status.has_ended(evicted) and not status.has_ended(pod("Running"))


@pytest.mark.parametrize(
    ("code", "reason", "fate"),
    [
        *((*each, "was deleted") for each in ((None, ""), (137, "Error"), (143, "Error"), (0, "Completed"))),
        (137, "OOMKilled", "exited with 137 (OOMKilled)"),
        (3, "Error", "exited with 3"),
    ],
)
def test_a_pod_that_its_deletion_has_ended_was_deleted(code: int | None, reason: str, fate: str):
    states: dict[str, object] = {"running": {}}
    deleted = pod("Failed", **(states if code is None else {"terminated": {"exitCode": code, "reason": reason}}))
    deleted["metadata"]["deletionTimestamp"] = "2026-11-28T04:00:00Z"
    assert status.fate(deleted) == fate
    beside = {"state": {"terminated": {"exitCode": 1, "reason": "Error"}}}
    deleted["status"]["containerStatuses"].append(beside)
    assert status.fate(deleted) == ("exited with 1" if code is None else fate), "the first container counts"


class Replacing:
    """An API server whose Job makes another pod when the launcher's is deleted, which it is while its log is read."""

    def __init__(self, code: int | None):
        self._old = launchers_pod("old", code)
        self.deleted = False

    def listed(self, kind: str, **query: str) -> list[manifest.Object]:
        left = [self._old] if status.exit_code(self._old) is not None else []
        return [*left, launchers_pod("new", 2)] if self.deleted else [launchers_pod("old", None)]

    def log(self, pod: str, follow: bool, since: str = "") -> Iterator[bytes]:
        assert pod == "old"
        yield b"2026-11-29T14:00:00Z a line"
        self.deleted = True


def launchers_pod(name: str, code: int | None) -> manifest.Object:
    state = {"running": {}} if code is None else {"terminated": {"exitCode": code}}
    status = {"phase": "Running" if code is None else "Failed", "containerStatuses": [{"state": state}]}
    return {"metadata": {"name": name}, "spec": {}, "status": status}


@pytest.mark.parametrize("code", [None, 143])
def test_a_pod_in_the_place_of_the_launchers_says_nothing_about_the_job(code: int | None):
    """That of a Job whose pod was deleted finds the Secret of the first one, and ends with 2."""
    job = Held("cifar10", "lab", "")
    job.__dict__["_api"] = Replacing(code)
    assert list(job.lines(True, print)) == [b"a line"]
    if code:
        assert job.exit_code() == code
    else:
        with pytest.raises(LaunchError, match="was deleted while it ran") as raised:
            job.exit_code()
        assert raised.value.code == 143


def test_the_newest_refusal_counts():
    failed = {"reason": "FailedCreate"}
    events = [{**failed, "lastTimestamp": f"2026-11-25T10:00:0{n}Z", "message": f"quota {n}"} for n in (1, 3, 2)]
    assert status.refused([*events, {"reason": "Scheduled", "lastTimestamp": "2027"}]) == "quota 3"
    assert status.refused([]) == ""


def test_a_wait_is_said_once_and_not_at_once():
    said: list[str] = []
    waiting = Waiting(said.append, 1.0)
    for text, now in (("a", 0.0), ("a", 0.5), ("b", 0.9), ("b", 2.0), ("b", 3.0), ("", 4.0), ("b", 5.0), ("b", 7.0)):
        waiting.tell(text, now)
    assert said == ["b"]


@pytest.mark.parametrize(
    "code, said, words, kind",
    [
        (403, 'pods "x" is forbidden: exceeded quota: q', "ResourceQuota, which `kubectl describe quota`", LaunchError),
        (403, 'jobs is forbidden: User "ann" cannot', "`kubectl auth can-i --list -n lab`", LaunchError),
        (404, 'namespaces "lab" not found', "--kube-namespace lab: `kubectl get namespaces`", LaunchError),
        (404, 'jobs.batch "x" not found', "", api.Gone),
        (409, "already exists", "", api.There),
        (401, "Unauthorized", "log in to the cluster again", LaunchError),
        (503, "starting", "", api.Absent),
    ],
)
def test_what_the_api_server_refuses_comes_with_a_fix(code: int, said: str, words: str, kind: type):
    error = api.refused(code, json.dumps({"message": said}), "lab")
    assert type(error) is kind and said in str(error) and words in str(error)
    assert "no JSON" in str(api.refused(500, "no JSON", "lab"))
