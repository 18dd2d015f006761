"""What the logs of a run say of the whole run: command, options, network, hosts, versions, workers.

The sources are the first lines that dmltrain writes (`dmltrain.fit.log_start`), the arguments that MXNet's programs
log, and the launcher's job.json beside the logs. What no source says is None.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from dmltrain.base.errors import UserError
from dmltrain.report.runs import arguments, job_record
from dmltrain.report.runs.arguments import Value
from dmltrain.report.runs.job_record import JobRecord
from dmltrain.report.runs.run import Run


@dataclass(frozen=True)
class Machine:
    """A host as a worker on it describes it. memory: GiB. versions: of python, torch, mxnet. devices: names of GPUs."""

    name: str
    processor: str = ""
    cores: int | None = None
    memory: float | None = None
    system: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    devices: tuple[str, ...] = ()

    def describe(self) -> str:
        """`AMD EPYC, 2 cores`, with the names of its GPUs."""
        cores = f"{self.cores} cores" if self.cores is not None else ""
        return ", ".join(filter(None, (self.processor, cores, *self.devices)))


@dataclass(frozen=True)
class Facts:
    """None or empty: the logs do not say it.

    options: by name with `_`, also of other programs. machines: those of workers, each once. hosts: names of all hosts
    of the job, worker_hosts: of those that run workers. devices: of one worker. batch: samples of one worker in a
    batch, batches: of one worker in an epoch. training_samples: of the data set or of --num-examples. seconds: of the
    job from start to end. cause: why the job failed. limits: the measured bandwidths, as printed. notes: what was wrong
    with the sources.
    """

    command: str | None = None
    options: Mapping[str, Value] = field(default_factory=dict)
    network: str | None = None
    parameters: int | None = None
    dataset: str | None = None
    training_samples: int | None = None
    validation_samples: int | None = None
    machines: tuple[Machine, ...] = ()
    hosts: tuple[str, ...] = ()
    worker_hosts: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    workers: int | None = None
    servers: int | None = None
    devices: int | None = None
    device: str | None = None
    batch: int | None = None
    batches: int | None = None
    backend: str | None = None
    launcher: str | None = None
    started: str | None = None
    seconds: float | None = None
    exit_code: int | None = None
    cause: str | None = None
    limits: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def host(self) -> str | None:
        """The name of the first worker's host."""
        return self.machines[0].name if self.machines else None

    @property
    def processor(self) -> str | None:
        return self.machines[0].processor or None if self.machines else None


def facts(run: Run) -> Facts:
    """The facts of `run`, from the lines that `reading` kept of its logs and from job.json in their folder."""
    known: dict[str, Any] = {}
    machines: dict[str, Machine] = {}
    nodes = {rank for head in run.heads for rank in re.findall(rb"Node\[(\d{1,6})\]", head)}
    for head in run.heads:
        for key, value in lines(head.decode("utf-8", "replace")):
            if key == "machine":
                machines.setdefault(value.name, value)
            else:
                known.setdefault(key, value)
    record, notes = _record(run)
    if len(nodes) > 1:
        known.setdefault("workers", len(nodes))  # all of them write to one log
    return _combined(known, tuple(machines.values()), record or JobRecord(), notes)


def _record(run: Run) -> tuple[JobRecord | None, tuple[str, ...]]:
    """job.json of the folder that was read, or of the folder of a file that the launcher named."""
    folder = run.log
    if not os.path.isdir(folder):
        folder, name = os.path.split(folder)
        if not re.fullmatch(r"(?:worker|server|scheduler)-\d+\.log", name):
            return None, ()
    try:
        return job_record.read(folder or "."), ()
    except UserError as error:
        return None, (str(error),)


def _combined(known: dict[str, Any], machines: tuple[Machine, ...], record: JobRecord, notes: tuple[str, ...]) -> Facts:
    options: dict[str, Value] = known.get("options") or {}
    command = known.get("command") or (shlex.join(record.command) if record.command else None)
    versions = {**record.versions, **{key: value for machine in machines for key, value in machine.versions.items()}}
    if "version" in known:
        versions["dmltrain"] = known["version"]
    devices, device = known.get("devices") or _devices_of(options)
    return Facts(
        command=command,
        options=options,
        network=known.get("network") or _network_of(options),
        parameters=known.get("parameters"),
        dataset=known.get("dataset") or _text(options, "dataset"),
        training_samples=known.get("training_samples") or _positive(options, "num_examples"),
        validation_samples=known.get("validation_samples"),
        machines=machines,
        hosts=record.hosts or tuple(machine.name for machine in machines),
        worker_hosts=record.worker_hosts or tuple(machine.name for machine in machines),
        versions=versions,
        workers=known.get("workers") or record.workers,
        servers=record.servers,
        devices=devices,
        device=device,
        batch=known.get("batch") or _batch_of(options),
        batches=known.get("batches"),
        backend=_text(options, "backend") or known.get("backend"),
        launcher=record.launcher,
        started=record.started,
        seconds=record.seconds,
        exit_code=record.exit_code,
        cause=record.cause,
        limits=known.get("limits"),
        notes=notes,
    )


# ---- lines ----------------------------------------------------------------------------------------------------------

_PREFIX = re.compile(r"^.*?(?:Node\[\d{1,6}\] |INFO:root:|: INFO: | - (?=Namespace))")
_COUNT = r"\d{1,15}"
_LINES: dict[str, re.Pattern[str]] = {
    "command": re.compile(r"dmltrain (?P<version>[\w.+-]{1,40}): (?P<command>.+)"),
    "network": re.compile(rf"Network (?P<network>\S{{1,200}}): (?P<parameters>{_COUNT}) parameters\b.*"),
    "data": re.compile(
        rf"Data (?P<dataset>\S{{1,200}})(?: .*)?: (?P<training_samples>{_COUNT}) training and "
        rf"(?P<validation_samples>{_COUNT}) validation samples"
    ),
    "machine": re.compile(r"Host (?P<name>.{1,300}?): (?P<machine>.{1,2000})"),
    "batch": re.compile(rf"Batch (?P<batch>{_COUNT}) per worker\b.*"),
    "start": re.compile(rf"Start training with (?P<devices>{_COUNT}) x (?P<device>cpu|gpu), (?P<workers>{_COUNT}) .*"),
    "contexts": re.compile(r"Start(?:ing|) (?:training )?with (?:devices )?\[(?P<contexts>[^\]]{3,2000})\].*"),
    "plan": re.compile(rf"Training epochs {_COUNT} to {_COUNT}, (?P<batches>{_COUNT}) batches each"),
    "limits": re.compile(r"Limits: (?P<limits>.{1,1000})"),
    "keras": re.compile(r"Using (?P<backend>\w{1,20}) backend\b.*"),
}


def lines(head: str) -> Iterator[tuple[str, Any]]:
    """What the first lines of one log say: (a field of Facts, its value); also version and machine."""
    for line in head.splitlines():
        message = _PREFIX.sub("", line, count=1)
        if "Namespace(" in message or "Options(" in message:
            if (options := arguments.read(message)) is not None:
                yield "options", options
            continue
        for pattern in _LINES.values():
            if match := pattern.fullmatch(message.rstrip()):
                yield from _facts_in(match)
                break


def _facts_in(match: re.Match[str]) -> Iterator[tuple[str, Any]]:
    groups = match.groupdict()
    if "machine" in groups:
        yield "machine", machine(groups["name"], groups["machine"])
    elif "contexts" in groups:
        names = re.findall(r"(cpu|gpu)\(\d+\)", groups["contexts"])
        if names:
            yield "devices", (len(names), names[0])
    elif "device" in groups:
        yield "devices", (int(groups["devices"]), groups["device"])
        yield "workers", int(groups["workers"])
    else:
        for key, text in groups.items():
            count = key in ("parameters", "training_samples", "validation_samples", "batch", "batches")
            yield key, int(text) if count else text.lower() if key == "backend" else text


_VERSION = re.compile(r"(Python|torch|mxnet) (\d[\w.+-]*)")


def machine(name: str, text: str) -> Machine:
    """`AMD EPYC, 2 cores, 23.5 GiB memory, Linux 6.1, Python 3.11.7, torch 2.13.0+cpu, 1 threads[, names of GPUs]`."""
    processor, _, rest = text.partition(" cores, ")
    processor, _, cores = processor.rpartition(", ")
    parts = rest.split(", ")
    memory = re.match(r"(\d{1,9}(?:\.\d{1,9})?) GiB memory", rest)
    threads = next((place for place, part in enumerate(parts) if re.fullmatch(r"\d+ threads", part)), len(parts))
    return Machine(
        name,
        processor if rest else text,
        int(cores) if cores.isascii() and cores.isdigit() and len(cores) < 9 else None,
        float(memory[1]) if memory else None,
        parts[1] if len(parts) > 1 else "",
        {match[1].lower(): match[2] for part in parts if (match := _VERSION.fullmatch(part))},
        tuple(parts[threads + 1 :]),
    )


# ---- options of other programs --------------------------------------------------------------------------------------


def _network_of(options: Mapping[str, Value]) -> str | None:
    """`network` and `num_layers` of MXNet's programs, `model` of gluoncv's."""
    name = _text(options, "network") or _text(options, "model")
    depth = _positive(options, "num_layers")
    return f"{name}-{depth}" if name and depth else name


def _devices_of(options: Mapping[str, Value]) -> tuple[int | None, str | None]:
    """`gpus='0,1'` of MXNet's programs; `num_gpus=8` of gluoncv's, where 0 is the CPU."""
    gpus, count = options.get("gpus"), options.get("num_gpus")
    if isinstance(gpus, str | int) and not isinstance(gpus, bool) and str(gpus).strip():
        return len(str(gpus).split(",")), "gpu"
    if type(count) is int and 0 <= count < 1 << 31:
        return max(1, count), "gpu" if count else "cpu"
    return None, None


def _batch_of(options: Mapping[str, Value]) -> int | None:
    """gluoncv's programs count the batch of one GPU."""
    batch, gpus = _positive(options, "batch_size"), _positive(options, "num_gpus")
    return batch * gpus if batch and gpus else batch


def _text(options: Mapping[str, Value], name: str) -> str | None:
    value = options.get(name)
    return value if isinstance(value, str) and value else None


def _positive(options: Mapping[str, Value], name: str) -> int | None:
    value = options.get(name)
    return value if type(value) is int and 0 < value < 1 << 62 else None
