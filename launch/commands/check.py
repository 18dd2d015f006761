"""--check: look at the hosts, measure the network between them, and say what to expect of a training program."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import replace

from launch.clusters import Cluster
from launch.forecast.forecast import Links
from launch.forecast.measure import Measured, Said, measure, start_line, understands
from launch.forecast.text import Outlook, sentences, tables
from launch.job.host import Host
from launch.job.job import Job, places
from launch.job.options import Options
from launch.job.placement import Place
from launch.preflight import Problem
from launch.preflight.table import Check, drawn, lines
from launch.run.session import Session, catching
from launch.run.start import limits, make_job, used_hosts
from launch.run.supervise import Supervisor

Tell = Callable[[str], None]


def check(options: Options, place: Cluster, tell: Tell, say: Tell) -> int:
    """Print what is found by `tell`, and what happens by `say`; the exit code."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    supervisor, found = _look(options, place)
    for line in lines(found, width):
        tell(line)
    code = supervisor.exit_code or found.exit_code
    if not options.program or code:
        return code
    why_not, job = _unexpectable(options)
    if job is None:
        tell(f"\nNo forecast: {why_not}.")
        return code
    say(start_line(job))
    measured = _measured(options, job, place)
    for line in _expect(options, job, place.hosts, found, measured, width):
        tell(line)
    return measured.interrupted


def _look(options: Options, place: Cluster) -> tuple[Supervisor, Check]:
    asked = options if options.num_workers else replace(options, num_workers=1)
    job = make_job(asked if asked.program else replace(asked, program=("true",)), "check")
    if job.copy_to:  # which would bring folder and program: there is nothing to look for yet
        job = replace(job, copy_to="", workdir="/", argv=("true",), needs=())
    supervisor = Supervisor(job, place.hosts, limits(options), check=True)
    session = Session(supervisor, place, Said(0), lambda: None)
    with catching(session.interrupt):
        session.run(None)
    found = supervisor.preparation
    hosts = [found.hosts.get(host.name, host) for host in place.hosts]
    cause = [Problem("", supervisor.cause.text, code=supervisor.cause.code)] if supervisor.cause else []
    problems = [*found.problems, *cause]
    return supervisor, Check(hosts, found.facts, found.reached, problems, found.throughput)


def _unexpectable(options: Options) -> tuple[str, Job | None]:
    """Why nothing can be said about the job; else the job."""
    if options.num_workers is None:
        return "give -n, the number of workers", None
    if options.sync_dst_dir:
        return "the program is not on the hosts before --sync-dst-dir copies it", None
    job = make_job(options, "check")
    if not job.num_servers:
        return "without servers (-s 0) dmltrain's kvstores share nothing", None
    if not understands(job):
        program = options.program[0]
        return f"{program} does not measure itself (DMLTRAIN_MEASURE in docs/environment.md), and was not started", None
    return "", job


def _measured(options: Options, job: Job, place: Cluster) -> Measured:
    every, place.hosts = place.hosts, used_hosts(job, place.hosts)
    try:
        return measure(job, place, options)
    finally:
        place.hosts = every


def _expect(options: Options, job: Job, hosts: list[Host], found: Check, measured: Measured, width: int) -> list[str]:
    """The forecast, or why there is none."""
    if measured.step is None:
        why = measured.failure or "it ended without a message of it"
        return ["", f"No forecast: the program told of no step ({why})."]
    outlook = Outlook(job.num_workers, _placing(job, options, hosts), measured.step, measured.computing, _links(found))
    text = [line for table in tables(outlook) for line in ["", *drawn(*table, width)]]
    failed = [f"Not all workers told of a step: {measured.failure}."] if measured.failure else []
    return [*text, "", *failed, *sentences(outlook)]


def _placing(job: Job, options: Options, hosts: list[Host]) -> Callable[[int], list[Place]]:
    """Where the processes of a job with so many workers would be; servers are as many, or as many as were asked for."""

    def of(workers: int) -> list[Place]:
        servers = workers if options.num_servers is None or job.num_servers == job.num_workers else job.num_servers
        return places(replace(job, num_workers=workers, num_servers=servers), hosts)

    return of


def _links(found: Check) -> Links:
    return Links(
        {
            (host, peer): path["speed"] / 8
            for host, peers in found.throughput.items()
            for peer, path in peers.items()
            if path.get("speed")
        }
    )
