"""The command line of dmltrain-job: a table of its verbs, and argv -> what is asked for. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from launch import LaunchError
from launch.command_line.options import BY_NAME, Option, split, table

REACHING = (
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
    """`mode` is the launcher's option that does it; "" is done here. `options` are the launcher's by their names."""

    target: str
    meaning: str
    mode: str = ""
    options: tuple[str, ...] = ()


VERBS = {
    "ls": Verb("[FOLDER]", "list the jobs whose logs are in FOLDER (default: logs)"),
    "ps": Verb("JOB", "list the processes of a job on all its hosts", "--ps", REACHING),
    "logs": Verb("JOB", "print the logs of a job", "--logs", ("--follow", "--show")),
    "kill": Verb("JOB", "end a job and whatever is left of it on its hosts", "--kill", ("--grace", *REACHING)),
}


@dataclass(frozen=True)
class Asked:
    """`verb` "" is the program itself. `launcher_argv` is what dmltrain-launch would be given for the same."""

    verb: str = ""
    target: str = ""
    launcher_argv: tuple[str, ...] = ()
    help: bool = False
    version: bool = False


def parse_job(argv: Sequence[str]) -> Asked:
    """LaunchError says what is wrong with `argv`."""
    if argv and argv[0] in ("-h", "--help"):
        return Asked(help=True)
    if argv and argv[0] == "--version":
        return Asked(version=True)
    name = argv[0] if argv else ""
    if name not in VERBS:
        near = difflib.get_close_matches(name, VERBS, 1)
        fix = f"did you mean {near[0]}?" if near else "dmltrain-job --help explains"
        what = f"unknown verb {name!r}" if name else "no verb given"
        raise LaunchError(f"{what}: there is {', '.join(VERBS)}; {fix}")
    return _parse_verb(name, VERBS[name], argv[1:])


def _parse_verb(name: str, verb: Verb, argv: Sequence[str]) -> Asked:
    """Options may stand before the target and after it."""
    options, rest = split(argv)
    more, rest_after = split(rest[1:])
    given = [*options, *more]
    if any(option is BY_NAME["--help"] for option, _, _ in given):
        return Asked(name, help=True)
    for option, spelling, _ in given:
        if option not in [BY_NAME[each] for each in verb.options]:
            raise LaunchError(f"{spelling} is no option of dmltrain-job {name}; dmltrain-job {name} --help lists them")
    if rest_after:
        raise LaunchError(f"dmltrain-job {name} takes one {verb.target}, and not {rest_after[0]!r} as well")
    if not rest and verb.mode:
        raise LaunchError(f"dmltrain-job {name} needs a {verb.target}: its name, or its folder of logs")
    target = rest[0] if rest else ""
    words = [word for option, spelling, value in given for word in ([spelling, value] if option.value else [spelling])]
    return Asked(name, target, (verb.mode, target, *words))


def usage_of(name: str) -> str:
    """The text of --help of a verb; of the program when it is ""."""
    if name:
        verb = VERBS[name]
        options = _options(verb)
        return f"""usage: dmltrain-job {name} [options] {verb.target}

{verb.meaning[0].upper()}{verb.meaning[1:]}. {_JOB if verb.mode else ""}

{table(options)}
"""
    verbs = "\n".join(f"  {f'{each} {verb.target}':<30}  {verb.meaning}" for each, verb in VERBS.items())
    return f"""usage: dmltrain-job VERB [options] [JOB]

{_JOB}

verbs:
{verbs}

  -h, --help                      print this, or with a verb, its options
  --version                       print the version
"""


_JOB = "JOB is the name of a job in logs/, or its folder of logs."


def _options(verb: Verb) -> list[Option]:
    rows = [BY_NAME[name] for name in (*verb.options, *HELP)]
    return [replace(row, meaning=row.meaning.removeprefix("with --logs: ")) for row in rows]
