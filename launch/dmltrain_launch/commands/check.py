"""--check: check the hosts, measure the network between them, and forecast the speed of a training program."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import replace

from dmltrain_launch.clusters import Cluster
from dmltrain_launch.forecast.forecast import Links
from dmltrain_launch.forecast.measure import KeptOutput, Measured, measure, start_line, supports_measuring
from dmltrain_launch.forecast.text import Outlook, sentences, tables
from dmltrain_launch.job.host import Host
from dmltrain_launch.job.job import Job, placements
from dmltrain_launch.job.options import Options
from dmltrain_launch.job.placement import Placement
from dmltrain_launch.preflight import Problem
from dmltrain_launch.preflight.table import Check, drawn, lines
from dmltrain_launch.run.described import limits, make_job, used_hosts
from dmltrain_launch.run.session import Session, catching
from dmltrain_launch.run.supervise import Supervisor

Print = Callable[[str], None]


def check(options: Options, cluster: Cluster, result: Print, progress: Print) -> int:
    """Print results with `result` and messages with `progress`. Returns the exit code."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    supervisor, facts = _check_hosts(options, cluster)
    for line in lines(facts, width):
        result(line)
    code = supervisor.exit_code or facts.exit_code
    if not options.program or code:
        return code
    obstacle, job = _job_to_forecast(options)
    if job is None:
        result(f"\nNo forecast: {obstacle}.")
        return code
    progress(start_line(job))
    measured = _measured(options, job, cluster)
    for line in _forecast(options, job, cluster.hosts, facts, measured, width):
        result(line)
    return measured.interrupted


def _check_hosts(options: Options, cluster: Cluster) -> tuple[Supervisor, Check]:
    sized = options if options.num_workers else replace(options, num_workers=1, elastic=False)
    job = make_job(sized if sized.program else replace(sized, program=("true",)), "check")
    if job.copy_to:  # folder and program would be copied, so the hosts need not have them yet
        job = replace(job, copy_to="", workdir="/", argv=("true",), needs=())
    supervisor = Supervisor(job, cluster.hosts, limits(options), check=True)
    session = Session(supervisor, cluster, KeptOutput(0), lambda: None)
    with catching(session.interrupt):
        session.run(None)
    preparation = supervisor.preparation
    hosts = [preparation.hosts.get(host.name, host) for host in cluster.hosts]
    cause = [Problem("", supervisor.cause.text, code=supervisor.cause.code)] if supervisor.cause else []
    problems = [*preparation.problems, *cause]
    return supervisor, Check(hosts, preparation.facts, preparation.reached, problems, preparation.throughput.measured)


def _job_to_forecast(options: Options) -> tuple[str, Job | None]:
    """("", job), or (why there is no forecast, None)."""
    if options.num_workers is None:
        return "give the number of workers with -n", None
    if options.sync_dst_dir:
        return "the program is not on the hosts until --sync-dst-dir has copied it", None
    job = make_job(options, "check")
    if not job.num_servers:
        return "without servers (-s 0) dmltrain's kvstores share nothing", None
    if not supports_measuring(job):
        program = options.program[0]
        return f"{program} does not support DMLTRAIN_MEASURE (docs/environment.md), so it was not started", None
    return "", job


def _measured(options: Options, job: Job, cluster: Cluster) -> Measured:
    all_hosts, cluster.hosts = cluster.hosts, used_hosts(job, cluster.hosts)
    try:
        return measure(job, cluster, options)
    finally:
        cluster.hosts = all_hosts


def _forecast(options: Options, job: Job, hosts: list[Host], facts: Check, measured: Measured, width: int) -> list[str]:
    """The forecast as lines, or why there is none."""
    if measured.step is None:
        why = measured.failure or "it exited without reporting one"
        return ["", f"No forecast: the program reported no step ({why})."]
    placed = _placements_by_workers(job, options, hosts)
    outlook = Outlook(job.num_workers, placed, measured.step, measured.computing, _links(facts))
    text = [line for table in tables(outlook) for line in ["", *drawn(*table, width)]]
    failed = [f"Not all workers reported a step: {measured.failure}."] if measured.failure else []
    return [*text, "", *failed, *sentences(outlook)]


def _placements_by_workers(job: Job, options: Options, hosts: list[Host]) -> Callable[[int], list[Placement]]:
    """Number of workers -> placements, with as many servers as workers unless -s gives another number."""

    def of(workers: int) -> list[Placement]:
        servers = workers if options.num_servers is None or job.num_servers == job.num_workers else job.num_servers
        return placements(replace(job, num_workers=workers, num_servers=servers), hosts)

    return of


def _links(facts: Check) -> Links:
    return Links(
        {
            (host, peer): path["speed"] / 8
            for host, peers in facts.throughput.items()
            for peer, path in peers.items()
            if path.get("speed")
        }
    )
