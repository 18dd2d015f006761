"""The command line of dmltrain-job: a table of its verbs, and argv -> JobRequest. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from launch import LaunchError
from launch.command_line.options import BY_NAME, Option, split, table

CONNECTION_OPTIONS = (
    "--ssh",
    "--ssh-port",
    "--identity",
    "--accept-new-host-keys",
    "--connect-timeout",
    "--mpirun",
    "--mpirun-args",
    "--host-ip",
)
HELP = ("--help",)


@dataclass(frozen=True)
class Verb:
    """`mode` is the launcher's option for the verb; "" if there is none. `options` names the launcher's options."""

    target: str
    meaning: str
    mode: str = ""
    options: tuple[str, ...] = ()


VERBS = {
    "ls": Verb("[FOLDER]", "list the jobs whose logs are in FOLDER (default: logs)"),
    "ps": Verb("JOB", "list the processes of a job on all its hosts", "--ps", CONNECTION_OPTIONS),
    "logs": Verb("JOB", "print the logs of a job", "--logs", ("--follow", "--show")),
    "kill": Verb(
        "JOB", "end a job and all processes that it left on its hosts", "--kill", ("--grace", *CONNECTION_OPTIONS)
    ),
}


@dataclass(frozen=True)
class JobRequest:
    """A parsed command line. `verb` is "" for dmltrain-job itself; `launcher_argv` is for dmltrain-launch."""

    verb: str = ""
    target: str = ""
    launcher_argv: tuple[str, ...] = ()
    help: bool = False
    version: bool = False


def parse_job(argv: Sequence[str]) -> JobRequest:
    """Parse `argv`; LaunchError if it is wrong."""
    if argv and argv[0] in ("-h", "--help"):
        return JobRequest(help=True)
    if argv and argv[0] == "--version":
        return JobRequest(version=True)
    name = argv[0] if argv else ""
    if name not in VERBS:
        near = difflib.get_close_matches(name, VERBS, 1)
        fix = f"did you mean {near[0]}?" if near else "see dmltrain-job --help"
        what = f"unknown verb {name!r}" if name else "no verb given"
        raise LaunchError(f"{what}: expected one of {', '.join(VERBS)}; {fix}")
    return _parse_verb(name, VERBS[name], argv[1:])


def _parse_verb(name: str, verb: Verb, argv: Sequence[str]) -> JobRequest:
    """Options may come before or after the target."""
    options, rest = split(argv)
    more, rest_after = split(rest[1:])
    given = [*options, *more]
    if any(option is BY_NAME["--help"] for option, _, _ in given):
        return JobRequest(name, help=True)
    for option, spelling, _ in given:
        if option not in [BY_NAME[each] for each in verb.options]:
            raise LaunchError(f"{spelling} is not an option of dmltrain-job {name}; see dmltrain-job {name} --help")
    if rest_after:
        raise LaunchError(f"dmltrain-job {name} takes one {verb.target}: remove {rest_after[0]!r}")
    if not rest and verb.mode:
        raise LaunchError(f"dmltrain-job {name} needs a {verb.target}: the job's name or its log folder")
    target = rest[0] if rest else ""
    words = [word for option, spelling, value in given for word in ([spelling, value] if option.value else [spelling])]
    return JobRequest(name, target, (verb.mode, target, *words))


def usage_of(name: str) -> str:
    """The --help text of a verb, or of dmltrain-job if `name` is ""."""
    if name:
        verb = VERBS[name]
        options = _options(verb)
        return f"""usage: dmltrain-job {name} [options] {verb.target}

{verb.meaning[0].upper()}{verb.meaning[1:]}.{f" {_JOB}" if verb.mode else ""}

{table(options)}
"""
    verbs = "\n".join(f"  {f'{each} {verb.target}':<30}  {verb.meaning}" for each, verb in VERBS.items())
    return f"""usage: dmltrain-job VERB [options] [JOB]

{_JOB}

verbs:
{verbs}

  -h, --help                      print this help and exit; after a verb, print its options
  --version                       print the version and exit
"""


_JOB = "JOB is the name of a job in logs/, or the path of its log folder."


def _options(verb: Verb) -> list[Option]:
    rows = [BY_NAME[name] for name in (*verb.options, *HELP)]
    return [replace(row, meaning=row.meaning.removeprefix("with --logs: ")) for row in rows]
