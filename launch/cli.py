"""`dmltrain-launch`: arguments -> job -> exit code. The only print and the only exit of this package."""

from __future__ import annotations

import os
import secrets
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from launch import LaunchError, report, version
from launch.clusters import cluster
from launch.job import Job, places
from launch.log_folder import LogFolder, default_path
from launch.options import Options, parse, usage
from launch.output import Display, Output, Plain, Silent
from launch.session import Connect, Session
from launch.supervise import FAULT_CODE, Supervisor

NAME = "dmltrain-launch"
IMPATIENT_SECONDS = 2.0  # how long who sent a signal waits for a terminal that stands still


def main(argv: Sequence[str] | None = None) -> None:
    """The script's entry point."""
    try:
        code = launch([as_utf8(word) for word in (sys.argv[1:] if argv is None else argv)])
    except LaunchError as error:
        say(f"{NAME}: error: {error}")
        code = error.code
    except KeyboardInterrupt:  # before there was a job
        code = 130
    except Exception:  # a fault of ours; the agents end the job when they hear no more of us
        traceback.print_exc()
        code = FAULT_CODE
    sys.exit(code)


def launch(argv: Sequence[str]) -> int:
    """Run what the command line says; its exit code."""
    options = parse(argv, {name: as_utf8(value) for name, value in os.environ.items()})
    if options.help or options.version:
        print(usage() if options.help else f"{NAME} {version()}", end="" if options.help else "\n")
        return 0
    began = time.time()
    name, path = _name_and_path(options, began)
    job = make_job(options, name)
    place = cluster(options.launcher)
    supervisor = Supervisor(job, place.hosts(options), options.grace, options.timeout)
    return run(supervisor, place.connect, options, LogFolder(path), str(path), began)


def run(supervisor: Supervisor, connect: Connect, options: Options, folder: LogFolder, path: str, began: float) -> int:
    """Run the job and say what became of it; its exit code."""
    names = [f"{role}-{rank}" for role, rank, _ in places(supervisor.job, list(supervisor.hosts.values()))]
    release = version()

    def record(ended: float | None = None) -> None:
        folder.write_record(report.record(supervisor, release, options.launcher, began, ended))

    record()
    say(report.start_line(supervisor, path))
    output = Output(folder, names, make_display(options, names))
    try:
        Session(supervisor, connect, output, on_all_started=record).run(folder.path)
        code, lines = supervisor.exit_code, report.failure(supervisor, output.last_lines, path)
        try:
            record(time.time())
        except LaunchError as error:
            code, lines = code or FAULT_CODE, [*lines, f"error: {error}"]
    finally:
        output.close(IMPATIENT_SECONDS if supervisor.interrupted else None)
    for line in lines:
        say(line if line.startswith(" ") else f"{NAME}: {line}")
    say(report.last_line(supervisor))
    return code


def make_job(options: Options, name: str) -> Job:
    if options.num_workers is None:
        raise LaunchError(f"-n/--num-workers is missing: {NAME} -n 2 -s 2 train.py ...")
    return Job(
        name=name,
        mark=f"{name}-{secrets.token_hex(8)}",
        argv=options.program,
        num_workers=options.num_workers,
        num_servers=options.num_workers if options.num_servers is None else options.num_servers,
        workdir=as_utf8(os.getcwd()),
        settings=options.settings,
        port=options.port,
    )


def make_display(options: Options, names: Sequence[str]) -> Display:
    terminal = sys.stdout.isatty()
    if options.quiet:
        return Silent()
    if terminal and options.live and os.environ.get("TERM", "dumb") != "dumb":
        from launch.live import Live  # rich takes a while to import

        return Live(names)
    return Plain(sys.stdout.fileno(), names, coloured=terminal and "NO_COLOR" not in os.environ)


def _name_and_path(options: Options, now: float) -> tuple[str, Path]:
    name = options.job or report.new_job_name(options.program, now)
    if options.log_dir:
        return name, Path(options.log_dir)
    return default_path(name, exact=bool(options.job))


def as_utf8(text: str) -> str:
    """What the system gave as bytes, as UTF-8 whatever the locale; bytes that are not UTF-8 survive as surrogates."""
    return os.fsencode(text).decode("utf-8", "surrogateescape")


def say(line: str) -> None:
    """One line to standard error; nobody may be there to read it."""
    try:
        print(line, file=sys.stderr, flush=True)
    except (OSError, UnicodeEncodeError):
        os.write(2, line.encode("ascii", "backslashreplace") + b"\n")


if __name__ == "__main__":
    main()
