"""`dmltrain-launch`: arguments -> what they ask for -> exit code. The only print and the only exit of this package."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence

from launch import LaunchError, version
from launch.clusters import Cluster, cluster
from launch.command_line.options import Options, parse, usage
from launch.run.start import NAME, Start, as_utf8, coloured, make_job, name_and_path, used_hosts
from launch.run.supervise import FAULT_CODE


def main(argv: Sequence[str] | None = None) -> None:
    """The script's entry point."""
    try:
        code = launch([as_utf8(word) for word in (sys.argv[1:] if argv is None else argv)])
    except LaunchError as error:
        say(f"{NAME}: error: {error}")
        code = error.code
    except KeyboardInterrupt:  # before there was a job
        code = 130
    except BrokenPipeError:  # nobody reads the rest of a listing: `--dry-run ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python complains when it flushes at its end
        code = 128 + signal.SIGPIPE
    except Exception:  # a fault of ours; the agents end the job when they hear no more of us
        traceback.print_exc()
        code = FAULT_CODE
    sys.exit(code)


def launch(argv: Sequence[str]) -> int:
    """Do what the command line says; its exit code."""
    options = parse(argv, {name: as_utf8(value) for name, value in os.environ.items()})
    return MODES[options.mode](options)


def run(options: Options) -> int:
    """Start a job and see it through."""
    name, path = name_and_path(options, time.time())
    job = make_job(options, name)
    with opened(options) as place:
        place.hosts = used_hosts(job, place.hosts)
        return Start(options, job, place, path, speaker(options)).run()


def check(options: Options) -> int:
    """Look at the hosts; start nothing but what measures itself."""
    from launch.commands import check

    with opened(options) as place:
        return check.check(options, place, print, lambda line: say(f"{NAME}: {line}"))


def dry_run(options: Options) -> int:
    """Print what would run where."""
    from launch.commands import dry_run

    job = make_job(options, name_and_path(options, time.time())[0])
    with opened(options) as place:
        for line in dry_run.lines(job, used_hosts(job, place.hosts), options):
            print(line)
    return 0


def logs(options: Options) -> int:
    """Print a job's logs."""
    from launch.commands import show

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
def opened(options: Options):
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


def say(line: str) -> None:
    """One line to standard error; nobody may be there to read it."""
    try:
        print(line, file=sys.stderr, flush=True)
    except (OSError, UnicodeEncodeError):
        with contextlib.suppress(OSError):
            os.write(2, line.encode("ascii", "backslashreplace") + b"\n")


if __name__ == "__main__":
    main()
