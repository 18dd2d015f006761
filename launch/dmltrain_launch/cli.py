"""The programs dmltrain-launch, dmltrain-check and dmltrain-job: argv -> options -> exit code.

Each mode imports only what it needs, which makes --help and completion faster.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from dmltrain_launch import NAME, LaunchError, as_utf8, version
from dmltrain_launch.clusters import LAUNCHERS, Allocating, Cluster, make_cluster
from dmltrain_launch.command_line.options import STARTS, check_usage, parse, usage, words_inside
from dmltrain_launch.ending import end_with, say, show
from dmltrain_launch.job.options import Options
from dmltrain_launch.run.supervisor.limit import FAULT_CODE

CHECK, JOB = "dmltrain-check", "dmltrain-job"


def main(argv: Sequence[str] | None = None) -> None:
    """dmltrain-launch."""
    end_with(NAME, launch, argv)


def check_main(argv: Sequence[str] | None = None) -> None:
    """dmltrain-check, the same as dmltrain-launch --check."""
    end_with(CHECK, check_, argv)


def job_main(argv: Sequence[str] | None = None) -> None:
    """dmltrain-job: the modes --ps, --logs and --kill of dmltrain-launch, and a list of jobs."""
    end_with(JOB, job, argv)


def launch(argv: Sequence[str]) -> int:
    """Run the mode that the command line selects. Returns the exit code."""
    options = parse(argv, environment())
    if goes_inside(options):
        from dmltrain_launch.clusters.queue import FOLLOWED, SUBMITTED

        # removed from the environment, because a program that this launcher starts may submit jobs of its own
        how = os.environ.pop(SUBMITTED, "")
        if not how:
            return submit(options, argv)
        if how == FOLLOWED:
            return followed(options)
        options = replace(options, mode="")  # a script that --dry-run has printed
    return MODES[options.mode](options)


def goes_inside(options: Options) -> bool:
    """Whether the launcher of this job is to run inside of the cluster."""
    if options.submit:
        return options.mode in ("", "dry-run")
    inside = options.launcher_inside or ("yes" if LAUNCHERS[options.launcher_name].inside else "no")
    return inside == "yes" and options.mode in STARTS


def check_(argv: Sequence[str]) -> int:
    options = parse(argv, environment())
    if options.mode in ("help", "version"):
        print(check_usage() if options.mode == "help" else f"{CHECK} {version()}\n", end="")
        return 0
    if options.mode not in ("", "check"):
        raise LaunchError(f"--{options.mode} is an option of {NAME}; {CHECK} only checks hosts")
    options = replace(options, mode="check")
    return submit(options, ["--check", *argv]) if goes_inside(options) else check(options, CHECK)


def job(argv: Sequence[str]) -> int:
    from dmltrain_launch.command_line.job_options import parse_job, usage_of

    request = parse_job(argv)
    if request.help:
        print(usage_of(request.verb), end="")
    elif request.version:
        print(f"{JOB} {version()}")
    elif request.verb == "ls":
        return jobs(request.target)
    elif request.change:
        from dmltrain_launch.commands.change import change

        return change(request.verb, request.target, request.change, show)
    else:
        return launch(request.launcher_argv)
    return 0


def jobs(folder: str) -> int:
    """List the jobs in a folder of logs."""
    from dmltrain_launch.commands import jobs
    from dmltrain_launch.terminal.log_folder import LOGS

    for line in jobs.table(jobs.find_jobs(Path(folder or LOGS)), time.time()):
        show(line)
    return 0


def environment() -> dict[str, str]:
    return {name: as_utf8(value) for name, value in os.environ.items()}


def run(options: Options) -> int:
    """Run a job to its end; with --detach only until it runs."""
    if not options.detach:
        return start(options)
    from dmltrain_launch.run.background import in_background

    return in_background(lambda started: start(options, started), say)


def start(options: Options, started: Callable[[str], None] | None = None) -> int:
    """Run a job to its end. With --detach `started` is called, with a text for the user, when it runs."""
    from dmltrain_launch.run.described import fitted, make_job, name_and_path
    from dmltrain_launch.run.start import Start

    name, path = name_and_path(options, time.time())
    job = make_job(options, name)
    with opened(options) as cluster:
        listed = cluster.hosts
        job, cluster.hosts = fitted(job, listed)
        keeper = None
        if started:
            from dmltrain_launch.run.keeper import Keeper

            keeper = Keeper(started)
        return Start(options, job, cluster, path, speaker(options), listed, keeper).run()


def check(options: Options, name: str = NAME) -> int:
    """Check the hosts. With a training program, also measure its step."""
    from dmltrain_launch.commands import check

    with opened(options) as cluster:
        return check.check(options, cluster, show, lambda line: say(f"{name}: {line}"))


def dry_run(options: Options) -> int:
    """Print the commands for each host."""
    from dmltrain_launch.commands import dry_run
    from dmltrain_launch.run.described import fitted, make_job, name_and_path

    job = make_job(options, name_and_path(options, time.time())[0])
    with opened(options) as cluster:
        asked = cluster.described() if isinstance(cluster, Allocating) else []
        for line in (*asked, *dry_run.lines(*fitted(job, cluster.hosts), options)):
            show(line)
    return 0


def submit(options: Options, argv: Sequence[str]) -> int:
    """Put the job into the cluster's queue, or with --dry-run print how."""
    from dmltrain_launch.clusters.queue import Inside, queue_of
    from dmltrain_launch.commands import submit
    from dmltrain_launch.run.described import make_job, name_and_path

    name, path = name_and_path(options, time.time())
    make_job(options, name)  # which finds mistakes
    words = words_inside(argv, environment(), options.launcher_name)
    job = Inside(options, tuple(argv), name, path, words)
    if options.mode == "dry-run":
        show("\n".join(queue_of(options.launcher_name).artefact(job)))
        return 0
    if options.submit:
        return submit.submit(job, say)
    from dmltrain_launch.commands import follow

    return follow.run(job, say)


def followed(options: Options) -> int:
    """Run the launcher inside of a cluster. The command that follows it gets nothing but its output, so all logs and
    files go there."""
    from dmltrain_launch.commands.follow import print_files
    from dmltrain_launch.run.described import name_and_path

    try:
        return MODES[options.mode](replace(options, quiet=False, live=False))
    finally:
        print_files(name_and_path(options, 0.0)[1])


def plan(options: Options) -> int:
    """Print which process runs on which host."""
    from dmltrain_launch.commands import dry_run
    from dmltrain_launch.run.described import fitted, make_job, name_and_path

    job = make_job(options, name_and_path(options, time.time())[0])
    with opened(options) as cluster:
        show(dry_run.plan(*fitted(job, cluster.hosts)))
    return 0


def logs(options: Options) -> int:
    """Print a job's logs."""
    from dmltrain_launch.commands import follow
    from dmltrain_launch.commands.log_choice import find
    from dmltrain_launch.commands.show import show as print_logs
    from dmltrain_launch.terminal.choice import coloured

    if follow.logs(options, find(options.target), say):
        return 0
    why = print_logs(options.target, options.show, options.follow, sys.stdout.fileno(), coloured())
    if why:
        say(f"{NAME}: {why}")
    return FAULT_CODE if why else 0


def processes(options: Options) -> int:
    from dmltrain_launch.commands import visit

    return visit.processes(options, show)


def kill(options: Options) -> int:
    from dmltrain_launch.commands import visit

    return visit.kill(options, say)


def attach(options: Options) -> int:
    from dmltrain_launch.commands import attach

    return attach.attach(options, speaker(options))


def help_(options: Options) -> int:
    print(usage(), end="")
    return 0


def version_(options: Options) -> int:
    print(f"{NAME} {version()}")
    return 0


# The function of each mode.
MODES: dict[str, Callable[[Options], int]] = {
    "": run,
    "check": check,
    "dry-run": dry_run,
    "plan": plan,
    "ps": processes,
    "kill": kill,
    "attach": attach,
    "logs": logs,
    "help": help_,
    "version": version_,
}


@contextlib.contextmanager
def opened(options: Options) -> Iterator[Cluster]:
    """The cluster that the options select; closed at the end of the block."""
    cluster: Cluster = make_cluster(options.launcher_name, options)
    try:
        if isinstance(cluster, Allocating):
            cluster.allocate(speaker(options))
        yield cluster
    finally:
        cluster.close()


def speaker(options: Options) -> Callable[[str], None]:
    """`say`, or with --log-file a function that also writes to the file."""
    if not options.log_file:
        return say
    try:
        file = open(options.log_file, "a", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115  open until exit
    except OSError as error:
        raise LaunchError(f"--log-file {options.log_file}: {error.strerror}") from None

    def both(line: str) -> None:
        say(line)
        with contextlib.suppress(OSError):
            print(line, file=file, flush=True)

    return both


if __name__ == "__main__":
    main()
