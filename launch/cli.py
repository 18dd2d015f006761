"""dmltrain-launch, dmltrain-check and dmltrain-job: arguments -> what they ask for -> exit code.

Each mode imports what it needs: --help and completion answer sooner for it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from launch import NAME, LaunchError, as_utf8, version
from launch.clusters import Cluster, cluster
from launch.command_line.options import check_usage, parse, usage
from launch.ending import end_with, say
from launch.job.options import Options
from launch.run.limit import FAULT_CODE

CHECK, JOB = "dmltrain-check", "dmltrain-job"


def main(argv: Sequence[str] | None = None) -> None:
    """dmltrain-launch."""
    end_with(NAME, launch, argv)


def check_main(argv: Sequence[str] | None = None) -> None:
    """dmltrain-check: what dmltrain-launch --check does."""
    end_with(CHECK, check_, argv)


def job_main(argv: Sequence[str] | None = None) -> None:
    """dmltrain-job: what dmltrain-launch --ps, --logs and --kill do, and a list of jobs."""
    end_with(JOB, job, argv)


def launch(argv: Sequence[str]) -> int:
    """Do what the command line says; its exit code."""
    options = parse(argv, environment())
    return MODES[options.mode](options)


def check_(argv: Sequence[str]) -> int:
    options = parse(argv, environment())
    if options.mode in ("help", "version"):
        print(check_usage() if options.mode == "help" else f"{CHECK} {version()}\n", end="")
        return 0
    if options.mode not in ("", "check"):
        raise LaunchError(f"--{options.mode} is an option of {NAME}: {CHECK} only looks at hosts")
    return check(replace(options, mode="check"), CHECK)


def job(argv: Sequence[str]) -> int:
    from launch.command_line.job_options import parse_job, usage_of

    asked = parse_job(argv)
    if asked.help:
        print(usage_of(asked.verb), end="")
    elif asked.version:
        print(f"{JOB} {version()}")
    elif asked.verb == "ls":
        return jobs(asked.target)
    else:
        return launch(asked.launcher_argv)
    return 0


def jobs(folder: str) -> int:
    """Print the jobs of a folder of logs."""
    from launch.commands import jobs
    from launch.terminal.log_folder import LOGS

    for line in jobs.table(jobs.find_jobs(Path(folder or LOGS)), time.time()):
        print(line)
    return 0


def environment() -> dict[str, str]:
    return {name: as_utf8(value) for name, value in os.environ.items()}


def run(options: Options) -> int:
    """Start a job and see it through."""
    from launch.run.start import Start, make_job, name_and_path, used_hosts

    name, path = name_and_path(options, time.time())
    job = make_job(options, name)
    with opened(options) as place:
        place.hosts = used_hosts(job, place.hosts)
        return Start(options, job, place, path, speaker(options)).run()


def check(options: Options, name: str = NAME) -> int:
    """Look at the hosts; start nothing but what measures itself."""
    from launch.commands import check

    with opened(options) as place:
        return check.check(options, place, print, lambda line: say(f"{name}: {line}"))


def dry_run(options: Options) -> int:
    """Print what would run where."""
    from launch.commands import dry_run
    from launch.run.start import make_job, name_and_path, used_hosts

    job = make_job(options, name_and_path(options, time.time())[0])
    with opened(options) as place:
        for line in dry_run.lines(job, used_hosts(job, place.hosts), options):
            print(line)
    return 0


def logs(options: Options) -> int:
    """Print a job's logs."""
    from launch.commands import show
    from launch.run.start import coloured

    why = show.show(options.target, options.show, options.follow, sys.stdout.fileno(), coloured())
    if why:
        say(f"{NAME}: {why}")
    return FAULT_CODE if why else 0


def processes(options: Options) -> int:
    from launch.commands import visit

    return visit.processes(options, print)


def kill(options: Options) -> int:
    from launch.commands import visit

    return visit.kill(options, say)


def help_(options: Options) -> int:
    print(usage(), end="")
    return 0


def version_(options: Options) -> int:
    print(f"{NAME} {version()}")
    return 0


# What the options' mode does.
MODES: dict[str, Callable[[Options], int]] = {
    "": run,
    "check": check,
    "dry-run": dry_run,
    "ps": processes,
    "kill": kill,
    "logs": logs,
    "help": help_,
    "version": version_,
}


@contextlib.contextmanager
def opened(options: Options) -> Iterator[Cluster]:
    """The hosts of the options, for as long as they are needed."""
    place: Cluster = cluster(options.place, options)
    try:
        yield place
    finally:
        place.close()


def speaker(options: Options) -> Callable[[str], None]:
    """`say`, into --log-file as well."""
    if not options.log_file:
        return say
    try:
        file = open(options.log_file, "a", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115  until the end
    except OSError as error:
        raise LaunchError(f"--log-file {options.log_file}: {error.strerror}") from None

    def both(line: str) -> None:
        say(line)
        with contextlib.suppress(OSError):
            print(line, file=file, flush=True)

    return both


if __name__ == "__main__":
    main()
