"""The command line of dmltrain-job: a table of its verbs, and argv -> JobRequest. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dmltrain_launch import LaunchError
from dmltrain_launch.command_line.options import split, table
from dmltrain_launch.command_line.table import BY_NAME, OPTIONS
from dmltrain_launch.job.options.option import Option
from dmltrain_launch.job.settings import EXAMPLE, parse

CONNECTION_OPTIONS = tuple(option.names[-1] for option in OPTIONS if option.reaches or option.record)
HELP = ("--help",)
SETTINGS = "kv_store=NAME staleness=N"


@dataclass(frozen=True)
class Verb:
    """`mode` is the launcher's option for the verb; "" if there is none. `options` names the launcher's options."""

    target: str
    meaning: str
    mode: str = ""
    options: tuple[str, ...] = ()
    change: str = ""  # what the word after the job names; "": there is none


VERBS = {
    "ls": Verb("[FOLDER]", "list the jobs whose logs are in FOLDER (default: logs)"),
    "ps": Verb("JOB", "list the processes of a job on all its hosts", "--ps", CONNECTION_OPTIONS),
    "logs": Verb("JOB", "print the logs of a job", "--logs", ("--follow", "--show")),
    "kill": Verb(
        "JOB", "end a job and all processes that it left on its hosts", "--kill", ("--grace", *CONNECTION_OPTIONS)
    ),
    "attach": Verb(
        "JOB",
        "take up a job that was started with --detach: show its output, replace what it has lost, wait for its end",
        "--attach",
        ("--quiet", "--no-live"),
    ),
    "add": Verb(
        "JOB",
        "add workers to a running elastic job: HOSTS such as h6,h7:2, or how many on the hosts that it has",
        change="HOSTS",
    ),
    "remove": Verb(
        "JOB",
        "let workers leave a running elastic job: HOSTS such as h2,h3, or workers such as worker:3",
        change="HOSTS",
    ),
    "set": Verb("JOB", "change the kvstore of a running job whose optimizer runs on the servers", change=SETTINGS),
}


@dataclass(frozen=True)
class JobRequest:
    """A parsed command line. `verb` is "" for dmltrain-job itself; `launcher_argv` is for dmltrain-launch. `change`:
    hosts, workers or settings that the verb names."""

    verb: str = ""
    target: str = ""
    launcher_argv: tuple[str, ...] = ()
    change: str = ""
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
        if option not in [BY_NAME[option] for option in verb.options]:
            raise LaunchError(f"{spelling} is not an option of dmltrain-job {name}; see dmltrain-job {name} --help")
    if verb.change and not given:
        return _parse_change(name, rest)
    if rest_after:
        raise LaunchError(f"dmltrain-job {name} takes one {verb.target}: remove {rest_after[0]!r}")
    if not rest and verb.mode:
        raise LaunchError(f"dmltrain-job {name} needs a {verb.target}: the job's name or its log folder")
    target = rest[0] if rest else ""
    words = [word for option, spelling, value in given for word in ([spelling, value] if option.value else [spelling])]
    return JobRequest(name, target, (verb.mode, target, *words))


def _parse_change(name: str, words: Sequence[str]) -> JobRequest:
    if VERBS[name].change == SETTINGS:
        if len(words) < 2 or not words[0]:
            raise LaunchError(f"dmltrain-job {name} takes a JOB and settings, such as dmltrain job set train {EXAMPLE}")
        text = " ".join(words[1:])
        parse(text)
        return JobRequest(name, words[0], change=text)
    example = f"dmltrain job {name} train h6,h7"
    if len(words) != 2 or not all(words):
        raise LaunchError(
            f"dmltrain-job {name} takes a JOB and HOSTS, such as {example}; hosts are separated by commas"
        )
    return JobRequest(name, words[0], change=words[1])


def usage_of(name: str) -> str:
    """The --help text of a verb, or of dmltrain-job if `name` is ""."""
    if name:
        verb = VERBS[name]
        options, words = _options(verb), f"{verb.target} {verb.change}" if verb.change else f"[options] {verb.target}"
        return f"""usage: dmltrain-job {name} {words}

{verb.meaning[0].upper()}{verb.meaning[1:]}.{f" {_JOB}" * bool(verb.mode or verb.change)}
{(_SET if verb.change == SETTINGS else _CHANGE) * bool(verb.change)}
{table(options)}
"""
    verbs = "\n".join(
        f"  {f'{each} {verb.target} {verb.change}'.rstrip():<30}  {verb.meaning}" for each, verb in VERBS.items()
    )
    return f"""usage: dmltrain-job VERB [options] [JOB]

{_JOB}

verbs:
{verbs}

  -h, --help                      print this help and exit; after a verb, print its options
  --version                       print the version and exit
"""


_CHANGE = """
Run it on the machine of the job's launcher. It returns when the workers have joined or left, or says why not.
"""
_SET = """
All workers change between two steps. Without staleness=N a new kvstore has its default; without kv_store=NAME only the
bound changes. Run it on the machine of the job's launcher. It returns when all have changed, or says why not.
"""
_JOB = "JOB is the name of a job in logs/, or the path of its log folder."


def _options(verb: Verb) -> list[Option]:
    rows = [BY_NAME[name] for name in (*verb.options, *HELP)]
    return [replace(row, meaning=row.meaning.removeprefix("with --logs: ")) for row in rows]
