"""Options: what the command does, and what it shows."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dmltrain_launch.job.options.option import FILE, Apply, Option, option, rows, switch, text


def _mode(mode: str) -> Apply:
    return lambda options, value, name, environ: replace(options, mode=mode, target=value)


@dataclass(frozen=True)
class ModeOptions:
    """See `Options`."""

    quiet: bool = switch("do not show the output of the processes; the logs have it", here=True)
    live: bool = switch("print plain lines instead of the live display", True, name="--no-live", here=True)
    config: str = option(
        "FILE", "YAML file with these options; the command line takes precedence", text(FILE), here=True
    )
    mode: str = rows(  # "" to start a job
        "",
        Option(
            ("--check",),
            "",
            "check the hosts and the network between them; forecast the speed of a training program",
            _mode("check"),
        ),
        Option(("--dry-run",), "", "print the commands for each host and start nothing", _mode("dry-run"), here=True),
        Option(("--plan",), "", "print as JSON which process runs on which host and start nothing", _mode("plan")),
        Option(("--ps",), "JOB", "list the processes of a job (its name or its log folder)", _mode("ps")),
        Option(("--kill",), "JOB", "end a job and all processes that it left on its hosts", _mode("kill")),
        Option(("--attach",), "JOB", "take up a job that was started with --detach", _mode("attach")),
        Option(("--logs",), "JOB", "print the logs of a job", _mode("logs")),
        Option(("--version",), "", "print the version and exit", _mode("version")),
        Option(("-h", "--help"), "", "print this help and exit", _mode("help")),
    )
    target: str = ""  # the job of --ps, --kill, --attach or --logs
    follow: bool = switch("with --logs: continue until the job ends", after="--logs")
    show: str = option(
        "WHO", "with --logs: only these processes, such as worker:0,scheduler", text("roles"), after="--follow"
    )
    program: tuple[str, ...] = ()
