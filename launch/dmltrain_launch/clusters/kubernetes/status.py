"""What Kubernetes says about pods and Jobs: whether they run, what they wait for, how they ended. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Found = Mapping[str, Any]  # an object of the API
PENDING, RUNNING, SUCCEEDED, FAILED = "Pending", "Running", "Succeeded", "Failed"
# Reasons of a waiting container that no time mends. The kubelet tries others again.
HOPELESS = ("InvalidImageName", "ErrImageNeverPull", "CreateContainerConfigError", "RunContainerError")
IMAGE = ("ErrImagePull", "ImagePullBackOff")
USUAL = ("ContainerCreating", "PodInitializing")
DELETED = "was deleted"
BY_DELETION = (0, 137, 143)  # exit codes of containers that end with their pod; a bridge that gets SIGTERM ends with 0
ENDS = ("Complete", "Completed", "Failed")  # conditions of a Job, or of a JobSet


def name_of(found: Found) -> str:
    return str(found["metadata"]["name"])


def phase(pod: Found) -> str:
    """Pending, Running, Succeeded or Failed; also "Terminating" for one that is being deleted."""
    if pod["metadata"].get("deletionTimestamp"):
        return "Terminating"
    return str(pod.get("status", {}).get("phase") or PENDING)


def grace(pods: Sequence[Found]) -> float:
    """The longest grace period of pods that are to be deleted, in seconds."""
    return max((float(pod["spec"].get("terminationGracePeriodSeconds") or 0) for pod in pods), default=0.0)


def node(pod: Found) -> str:
    """The name of its node; "" if it has none yet."""
    return str(pod.get("spec", {}).get("nodeName") or "")


def waiting(pod: Found) -> tuple[str, str]:
    """Why a pod does not run yet: a reason of Kubernetes, and its words; "" for both if it says nothing."""
    status = pod.get("status", {})
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return str(condition.get("reason", "")), str(condition.get("message", ""))
    for state in _states(pod, "waiting"):
        return str(state.get("reason", "")), str(state.get("message") or "")
    return "", ""


def why_waiting(pods: Sequence[Found], count: int, what: str) -> str:
    """What a job waits for, as text; "" if all `count` pods run. `what`: these are, in words."""
    late = [pod for pod in pods if phase(pod) == PENDING]
    missing = count - sum(phase(pod) == RUNNING for pod in pods)
    if missing <= 0:
        return ""
    reasons = {f"{reason}: {words}" if words else reason for reason, words in map(waiting, late)}
    texts = sorted(reason for reason in reasons if reason and reason not in USUAL)
    return f"waiting for {missing} of {count} {what}" + (f": {'; '.join(texts)}" if texts else "")


def waits_for_secret(pod: Found, name: str) -> bool:
    """Whether a pod waits for a Secret of this name. The kubelet looks again after some seconds."""
    reason, words = waiting(pod)
    return reason == "CreateContainerConfigError" and f'secret "{name}" not found' in words


def image_problem(pods: Sequence[Found], patient: bool) -> str:
    """The words of a pod that will never run; with `patient` not of one whose image may still be pulled."""
    for pod in pods:
        reason, words = waiting(pod)
        if reason in HOPELESS or (reason in IMAGE and not patient):
            return f"{name_of(pod)}: {reason}{f': {words}' if words else ''}"
    return ""


def fate(pod: Found) -> str:
    """How a pod has ended, or is ending; "" if it lives."""
    status = pod.get("status", {})
    why = ": ".join(str(status[key]) for key in ("reason", "message") if status.get(key))
    for state in _states(pod, "terminated"):
        code, reason = state.get("exitCode"), state.get("reason")
        usual = reason in ("Error", "Completed", None)
        if phase(pod) == "Terminating" and code in BY_DELETION and usual and not why:
            return DELETED
        return f"exited with {code}{'' if usual else f' ({reason})'}{f': {why}' if why else ''}"
    if phase(pod) == "Terminating":
        return DELETED
    return (why or "failed") if phase(pod) == FAILED else ""


def exit_code(pod: Found) -> int | None:
    """Of its main container, the first one; None if that has not ended."""
    for state in _states(pod, "terminated"):
        code = state.get("exitCode")
        return code if isinstance(code, int) else None
    return None


def has_ended(pod: Found) -> bool:
    return phase(pod) in (SUCCEEDED, FAILED) or exit_code(pod) is not None


def _states(pod: Found, kind: str) -> Iterator[Found]:
    for container in pod.get("status", {}).get("containerStatuses") or ():
        state = (container.get("state") or {}).get(kind)
        if state:
            yield state


def job_state(job: Found) -> str:
    """Of a Job or a JobSet: whether it is there, waits for its queue, has succeeded or has failed, and why."""
    status = job.get("status", {})
    for condition in status.get("conditions") or ():
        if condition.get("status") == "True" and condition.get("type") in ENDS:
            words = condition.get("message") or condition.get("reason")
            return f"has failed ({words})" if condition["type"] == "Failed" else "has ended"
    return "is suspended, as Kueue does until its queue has room" if job["spec"].get("suspend") else "is there"


def job_lives(job: Found) -> bool:
    conditions = job.get("status", {}).get("conditions") or ()
    return not any(condition.get("status") == "True" and condition.get("type") in ENDS for condition in conditions)


def refused(events: Sequence[Found]) -> str:
    """Why a Job could not make its pods, or a JobSet its Jobs, by the newest event; "" if none says so."""
    failed = [event for event in events if event.get("reason") in ("FailedCreate", "JobCreationFailed")]
    newest = max(failed, key=lambda each: str(each.get("lastTimestamp") or ""), default=None)
    return str(newest.get("message", "")) if newest else ""


def table(pods: Sequence[Found], part: str) -> list[str]:
    """A line for each pod. `part`: the label that says what it is for."""
    rows = [(str(pod["metadata"].get("labels", {}).get(part, "")), name_of(pod), pod) for pod in pods]
    return [_row(*each) for each in sorted(rows, key=lambda row: (row[0] != "launcher", row[1]))]


def _row(kind: str, name: str, pod: Found) -> str:
    reason, words = waiting(pod)
    why = "" if phase(pod) != PENDING else ": ".join(each for each in (reason, words) if each)
    where = f" on {node(pod)}" if node(pod) else ""
    return f"{kind} {name}{where}: {phase(pod)}{f' ({why})' if why else ''}"
