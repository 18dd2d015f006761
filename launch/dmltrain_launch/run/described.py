"""What the options describe: the job, the hosts that it uses, its name and folder, its limits."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dmltrain_launch import NAME, LaunchError, as_utf8
from dmltrain_launch.clusters import LAUNCHERS
from dmltrain_launch.job.host import Host
from dmltrain_launch.job.job import Job, placements, with_workers_for
from dmltrain_launch.job.options import Options
from dmltrain_launch.job.placement import LISTED_HOSTS, workers_by_host
from dmltrain_launch.job.role import SERVER, WORKER
from dmltrain_launch.job.rule import Rule
from dmltrain_launch.preflight import script
from dmltrain_launch.run import report
from dmltrain_launch.run.supervisor.limit import Limits
from dmltrain_launch.terminal.log_folder import default_path

RESTART_SCHEDULER = 3  # by default, in an elastic job


def make_job(options: Options, name: str) -> Job:
    """The job that the options describe; LaunchError if they are incomplete."""
    if options.num_workers is None:
        raise LaunchError(f"-n/--num-workers is missing: {NAME} -n 2 -s 2 train.py ...")
    _check_wire(options)
    _check_torch_backend(options)
    num_servers = options.servers
    elastic = _elastic(options, options.num_workers, num_servers)
    job = Job(
        name=name,
        mark=new_mark(name),
        argv=options.program,
        num_workers=options.num_workers,
        num_servers=num_servers,
        workdir=_folder_here(),
        settings=options.settings,
        port=options.port,
        placement=options.placement,
        copy_to=options.sync_dst_dir,
        over_network=LAUNCHERS[options.launcher_name].over_network,
        interface=options.interface,
        subnet=options.subnet,
        memory={WORKER: options.worker_memory, SERVER: options.server_memory},
        torch_env=_torch_env(options),
        torch_backend=options.torch_backend,
        wire=options.wire,
        elastic=elastic,
        most_workers=options.most_workers,
        wait_for_hosts=options.wait_for_hosts or 0.0,
        restart_workers=options.restart_workers or 0,
        restart_servers=options.restart_servers or 0,
        restart_scheduler=_restart_scheduler(options),
        rules=_rules(options, num_servers),
        detach=_detach(options, num_servers),
        usage=options.usage,
    )
    return replace(job, needs=_needs(job.script)) if job.over_network else job


def _torch_env(options: Options) -> bool:
    """Whether workers get the variables of torch.distributed, such as RANK.

    With auto they do if it has dmltrain's backend of torch.distributed. They do not if it uses dmltrain otherwise,
    because it may check for RANK, or if it uses MXNet and not torch.distributed, because its ranks are those of dmlc's
    tracker.
    """
    if options.torch_env != "auto":
        return options.torch_env == "on"
    used = script.read(options.program)
    if used.uses_torch_backend or options.torch_backend:
        return True
    return not used.uses_dmltrain and (used.uses_torch_distributed or not used.uses_mxnet)


def _check_wire(options: Options) -> None:
    used = script.read(options.program)
    if options.wire != "plain" and used.uses_mxnet and not used.uses_dmltrain:
        raise LaunchError(
            f"--wire {options.wire}: {script.script_of(options.program)} uses MXNet, whose parameter server can "
            "neither authenticate nor encrypt what it sends; start it without --wire"
        )


def _check_torch_backend(options: Options) -> None:
    if options.torch_backend and not script.script_of(options.program):
        raise LaunchError(
            f"--torch-backend {options.torch_backend}: {options.program[0]} is not a Python script: expected "
            "train.py ..., or python train.py ..."
        )


def _elastic(options: Options, num_workers: int, num_servers: int) -> int:
    """`Job.elastic`; LaunchError if the job cannot be elastic."""
    if not options.elastic:
        return 0
    if reason := LAUNCHERS[options.launcher_name].inelastic:
        raise LaunchError(f"--launcher {options.launcher_name} --elastic: {reason}; use --launcher ssh")
    if not num_servers:
        raise LaunchError("--elastic needs servers: give -s 1 or more")
    least = options.min_workers or (num_workers if options.most_workers else 1)
    if least > num_workers:
        raise LaunchError(f"--min-workers {least} is more than -n {num_workers}")
    return least


def _detach(options: Options, num_servers: int) -> bool:
    """Whether the job goes on without its launcher. LaunchError if the options do not allow that."""
    if not options.detach:
        return False
    if reason := LAUNCHERS[options.launcher_name].undetached:
        raise LaunchError(f"--launcher {options.launcher_name} --detach: {reason}")
    if options.max_restarts:
        raise LaunchError(
            "--detach does not go with --max-restarts: use --elastic with --restart-workers, or leave one of them out"
        )
    if not num_servers:
        raise LaunchError(
            "--detach needs servers (-s 1 or more): the job's scheduler ends the others when one process is lost "
            "and no launcher is there"
        )
    return True


def _rules(options: Options, num_servers: int) -> tuple[Rule, ...]:
    """The rules of the job. LaunchError if there are rules and the job's kvstore cannot change."""
    if options.rules and not num_servers:
        raise LaunchError("--rule needs servers: give -s 1 or more")
    return options.rules


def _restart_scheduler(options: Options) -> int:
    if not options.elastic:
        return 0
    return RESTART_SCHEDULER if options.restart_scheduler is None else options.restart_scheduler


def advice(job: Job, hosts: Sequence[Host] = (), torch_env: str = "auto") -> list[str]:
    """Warnings before the job starts on `hosts`. `torch_env`: the option."""
    return [*_advice_on_script(job), *_advice_on_counts(job, hosts, torch_env)]


def _advice_on_counts(job: Job, hosts: Sequence[Host], torch_env: str) -> list[str]:
    asked = torch_env == "on" or (torch_env == "auto" and script.read(job.argv).uses_lightning)
    counts = workers_by_host(placements(job, hosts)) if asked and hosts else {}
    if len(set(counts.values())) < 2:
        return []
    listed = ", ".join(f"{name} {count}" for name, count in list(counts.items())[:LISTED_HOSTS])
    more = ", ..." if len(counts) > LISTED_HOSTS else ""
    return [
        f"the hosts have unequal numbers of workers ({listed}{more}): PyTorch Lightning, and others that make "
        "ranks of GROUP_RANK and LOCAL_RANK, then wait for ever; choose -n and slots= so that all have the same number"
    ]


def _advice_on_script(job: Job) -> list[str]:
    used, file = script.read(job.argv), script.script_of(job.argv)
    if job.torch_backend:
        return []
    if job.wire != "plain" and file and not used.uses_dmltrain:
        return [f"{file} does not import dmltrain itself: --wire {job.wire} protects only what dmltrain sends"]
    if job.num_servers and used.uses_torch_distributed and not used.uses_dmltrain:
        message = f"{file} uses torch.distributed and not dmltrain"
        return [f"{message}: its servers have nothing to do; start it with -s 0, or move it to dmltrain"]
    return []


def _folder_here() -> str:
    try:
        return as_utf8(os.getcwd())
    except OSError as error:
        raise LaunchError(f"the working directory does not exist: {error.strerror}; cd to another one") from None


def new_mark(name: str) -> str:
    """The mark of a new attempt, by which its processes are found. It matches `dmltrain_launch.job.job.MARK`."""
    return f"{re.sub('[^A-Za-z0-9_.-]', '_', name)}-{secrets.token_hex(8)}"


def _needs(path: str) -> tuple[str, ...]:
    """The modules that the script imports, so that each host is checked for them; () if the script is not readable."""
    try:
        return tuple(script.needs(Path(path).read_text())) if path else ()
    except (OSError, UnicodeDecodeError, SyntaxError):
        return ()


def fitted(job: Job, hosts: Sequence[Host]) -> tuple[Job, list[Host]]:
    """The job with as many workers as the hosts have room for, and the hosts that it uses."""
    job = with_workers_for(job, hosts) if job.most_workers else job
    return job, used_hosts(job, hosts)


def used_hosts(job: Job, hosts: Sequence[Host]) -> list[Host]:
    """The hosts that have a process of the job, in their order; LaunchError if the job does not fit on them."""
    used = {host.name for _, _, host in placements(job, hosts)}
    return [host for host in hosts if host.name in used]


def name_and_path(options: Options, now: float) -> tuple[str, Path]:
    """The job's name and its log folder."""
    name = options.job or report.new_job_name(options.program, now)
    if options.log_dir:
        return name, Path(options.log_dir)
    return default_path(name, exact=bool(options.job))


def limits(options: Options) -> Limits:
    endless = float("inf")
    return Limits(options.grace, options.timeout or endless, options.start_timeout or endless)
