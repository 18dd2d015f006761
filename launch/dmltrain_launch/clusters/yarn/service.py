"""The service that a job is for YARN, as its REST API takes it. Pure.

It has two components: `launcher`, one container, whose end is the service's end, and `host`, a container for each host
of the job. Both run `container`, from the folder of logs, which all nodes see. YARN hands a launch command through two
shells inside of double quotes and replaces ${NAME} in it, so words in it are percent-encoded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from dmltrain_launch.clusters.queue import engine_name, passed_on
from dmltrain_launch.clusters.share import Share, share
from dmltrain_launch.clusters.yarn import YarnOptions
from dmltrain_launch.job.options import Options

LAUNCHER, HOST = "launcher", "host"
GPU = "yarn.io/gpu"
MOST_NAME = 55  # characters
LEAST_MEMORY = 1024  # MiB, of a container whose processes have no limits
LAUNCHER_MEMORY = 1024  # MiB
MODULE = "dmltrain_launch.clusters.yarn.container"
# Properties of YARN's services: no container is started again, the service has the state of its launcher's container.
PROPERTIES = {"yarn.service.container-failure.retry.max": "0", "yarn.service.am-restart.max-attempts": "1"}
APART = {"type": "ANTI_AFFINITY", "scope": "NODE", "target_tags": [HOST]}  # each container on another node
DOMINANT = {"yarn.service.container-state-report-as-service-state": "true"}


@dataclass(frozen=True)
class Described:
    """A job for YARN. `words`: the command line of its launcher, which works in `workdir`; `folder`: of its logs."""

    name: str
    options: YarnOptions
    words: tuple[str, ...]
    workdir: str
    folder: str
    python: str
    variables: Mapping[str, str]

    @property
    def hosts(self) -> int:
        return self.options.yarn_hosts or self.options.num_workers or 1

    @property
    def share(self) -> Share:
        return share(self.options, self.hosts, cores_of_worker=1)


def service_name(name: str, exact: bool) -> str:
    """The name for YARN. `exact`: the user has chosen it, so it is not changed, but refused."""

    def cut(made: str) -> str:
        made = made[-54:].strip("-")
        return made if made[:1].isalpha() else f"j{made}"

    return engine_name("YARN", name, exact, MOST_NAME, cut)


def variables(options: Options, environ: Mapping[str, str]) -> dict[str, str]:
    """Those of this machine that the launcher needs in its container; LaunchError for secrets."""
    kept = passed_on(options, environ, "YARN shows the specification of a service to others")
    return kept | ({"PYTHONPATH": environ["PYTHONPATH"]} if environ.get("PYTHONPATH") else {})


def service(job: Described) -> dict[str, Any]:
    """The specification: what `POST /app/v1/services` takes, and `yarn app -launch`."""
    specification: dict[str, Any] = {
        "name": job.name,
        "version": "1.0.0",
        "description": "a job of dmltrain",
        "configuration": {"properties": dict(PROPERTIES)},
        "components": [
            _component(
                LAUNCHER, 1, _command(job, LAUNCHER, job.workdir, str(job.hosts), str(job.share.gpus), *job.words)
            )
            | {"resource": {"cpus": 1, "memory": str(LAUNCHER_MEMORY)}, "configuration": _configuration(job, DOMINANT)},
            _component(HOST, job.hosts, f"{_command(job, HOST)} ${{COMPONENT_ID}}")
            | {"resource": _resource(job), "configuration": _configuration(job, {})}
            | {"placement_policy": {"constraints": [APART]}},
        ],
    }
    return specification | ({"queue": job.options.queue} if job.options.queue else {})


def _component(name: str, count: int, command: str) -> dict[str, Any]:
    return {"name": name, "number_of_containers": count, "launch_command": command, "restart_policy": "NEVER"}


def _configuration(job: Described, properties: Mapping[str, str]) -> dict[str, Any]:
    return {"properties": dict(properties), "env": dict(job.variables)}


def _command(job: Described, what: str, *words: str) -> str:
    return " ".join([quote(job.python), "-m", MODULE, what, *map(quote, (job.folder, *words))])


def _resource(job: Described) -> dict[str, Any]:
    """What a host needs."""
    gpus = {"additional": {GPU: {"value": job.share.gpus, "unit": ""}}} if job.share.gpus else {}
    return {"cpus": job.share.cpus, "memory": str(max(job.share.memory, LEAST_MEMORY)), **gpus}


# -- what YARN says of a service ---------------------------------------------------------------------------------------

ENDED = ("STOPPED", "FAILED", "SUCCEEDED")


def running(service: Mapping[str, Any]) -> int:
    """How many of its containers run."""
    return sum(len(component.get("containers") or ()) for component in service.get("components") or ())


def wanted(service: Mapping[str, Any]) -> int:
    return sum(int(component.get("number_of_containers") or 0) for component in service.get("components") or ())


def state(found: Mapping[str, Any]) -> str:
    """Its state, and how many containers it has."""
    said = f" ({found['diagnostics']})" if found.get("diagnostics") else ""
    return f"is {found.get('state', 'in no state')}: {running(found)} of {wanted(found)} containers run{said}"


def table(components: Sequence[Mapping[str, Any]] | None) -> list[str]:
    """A line for each container."""
    return [
        f"  {each.get('component_instance_name', '?')} on {each.get('bare_host', '?')}: {each.get('state', '?')}"
        for component in components or ()
        for each in component.get("containers") or ()
    ]
