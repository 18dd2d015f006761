"""dmltrain-completion bash|zsh: the completion of `dmltrain` and of every verb beside it, as a script for the shell.

What a verb takes is read from its --help, which its argument table makes: a line of two spaces, names, a value, at
least two spaces and the meaning is an option; below `verbs:`, the first word of each line is a verb of its own.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from launch import LaunchError
from launch.ending import end_with

NAME = "dmltrain-completion"
PREFIX = "dmltrain-"
HELP_SECONDS = 20.0
USAGE = f"""usage: {NAME} bash|zsh

Print the completion script for this shell. To use it in each new shell:

  bash   echo 'eval "$(dmltrain completion bash)"' >> ~/.bashrc
  zsh    echo 'eval "$(dmltrain completion zsh)"' >> ~/.zshrc      (after compinit)

  -h, --help                      print this
"""
ROW = re.compile(r"  +(-\S.*?)(?:  .*)?")
NAME_AND_VALUE = re.compile(r"(-[\w-]+)(?:[ =](.+))?")
VERB = re.compile(r"  (\w[\w-]*)\b.*")
FOLDERS, JOBS = ("DIR", "FOLDER"), ("JOB",)


@dataclass(frozen=True)
class Command:
    """`words` are the verb and, where it has verbs of its own, one of these; `options` name their values, or ""."""

    words: str
    options: dict[str, str]
    verbs: tuple[str, ...] = ()
    target: str = ""  # the last word of its usage, such as JOB


def main(argv: Sequence[str] | None = None) -> None:
    """dmltrain-completion."""
    end_with(NAME, complete, argv)


def complete(argv: Sequence[str]) -> int:
    if list(argv) in (["-h"], ["--help"]):
        print(USAGE, end="")
        return 0
    if len(argv) != 1 or argv[0] not in SHELLS:
        raise LaunchError(f"expected one shell, {' or '.join(SHELLS)}: dmltrain completion bash")
    print(SHELLS[argv[0]](commands(Path(sys.argv[0]).absolute().parent)), end="")
    return 0


def commands(folder: Path) -> list[Command]:
    """Every verb in `folder`; one that gives no help has no options."""
    programs = sorted(path for path in folder.glob(f"{PREFIX}*") if path.is_file() and os.access(path, os.X_OK))
    with ThreadPoolExecutor() as pool:
        return [each for found in pool.map(_commands_of, programs) for each in found]


def _commands_of(program: Path) -> list[Command]:
    name, text = program.name.removeprefix(PREFIX), _help([str(program)])
    verbs = tuple(_verbs(text))
    below = [_command(f"{name} {verb}", _help([str(program), verb])) for verb in verbs]
    return [_command(name, text, verbs), *below]


def _command(words: str, text: str, verbs: tuple[str, ...] = ()) -> Command:
    usage = text.partition("\n")[0].split()
    return Command(words, dict(_options(text)), verbs, usage[-1] if usage and not verbs else "")


def _help(command: list[str]) -> str:
    try:
        done = subprocess.run(
            [*command, "--help"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            errors="replace",
            timeout=HELP_SECONDS,
            env={**os.environ, "COLUMNS": "200"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _options(text: str) -> Iterator[tuple[str, str]]:
    """Each name of each option, and what it calls its value."""
    for line in text.splitlines():
        row = ROW.fullmatch(line)
        found = [NAME_AND_VALUE.fullmatch(each) for each in row[1].split(", ")] if row else []
        value = next((match[2] for match in found if match and match[2]), "")  # beside each name, or the last one
        yield from ((match[1], value) for match in found if match)


def _verbs(text: str) -> Iterator[str]:
    """The words below the line `verbs:`, to the next empty line."""
    for line in text.partition("\nverbs:\n")[2].splitlines():
        match = VERB.fullmatch(line)
        if not match:
            return
        yield match[1]


def choices(value: str) -> str:
    """The words that an option may have, where its value names them: auto|on|off, or {a,b} as argparse has it."""
    if "|" in value:
        return value.replace("|", " ")
    match = re.fullmatch(r"\{([^{}]*)\}.*", value)
    return match[1].replace(",", " ") if match else ""


# -- the scripts ---------------------------------------------------------------------------------------------------

BASH = """# Completion of dmltrain, made by dmltrain completion; it knows the verbs and options of that time.
_dmltrain() {
    local word=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]} at=1 command verbs options
    COMPREPLY=()
    command=${COMP_WORDS[0]##*/}
    if [[ $command == dmltrain ]]; then
        if ((COMP_CWORD == 1)); then
            COMPREPLY=($(compgen -W "@VERBS@ help --help --version" -- "$word"))
            return
        fi
        command=${COMP_WORDS[1]} at=2
    fi
    command=${command#dmltrain-}
    case $command in
@BELOW@
    esac
    case "$command $previous" in
@VALUES@
    esac
    if [[ $word == -* ]]; then
        case $command in
@OPTIONS@
        esac
        COMPREPLY=($(compgen -W "$options" -- "$word"))
        return
    fi
    case $command in
        help) COMPREPLY=($(compgen -W "@VERBS@" -- "$word")) ;;
@TARGETS@
    esac
}
_dmltrain_jobs() {
    local record jobs=
    for record in logs/*/job.json; do
        if [[ -f $record ]]; then record=${record%/job.json} jobs="$jobs ${record##*/}"; fi
    done
    COMPREPLY=($(compgen -W "$jobs" -- "$1"))
}
complete -o default -F _dmltrain @PROGRAMS@
"""


def bash(found: Sequence[Command]) -> str:
    """A script that needs nothing but bash 4 or later; where it has nothing to offer, bash offers files."""
    top = [each.words for each in found if " " not in each.words]
    parts = {
        "VERBS": " ".join(top),
        "BELOW": "\n".join(_below(each) for each in found if each.verbs),
        "VALUES": "\n".join(_values(found)),
        "OPTIONS": "\n".join(_case([each.words], f'options="{" ".join(each.options)}"') for each in found),
        "TARGETS": "\n".join(_case([each.words], _offer(each.target)) for each in found if _offer(each.target)),
        "PROGRAMS": " ".join(shlex.quote(each) for each in ["dmltrain", *(PREFIX + verb for verb in top)]),
    }
    return re.sub("@([A-Z]+)@", lambda match: parts[match[1]], BASH)


def _below(command: Command) -> str:
    """Completes the verb of a verb; after it, both are the command."""
    return f"""        {command.words})
            if ((COMP_CWORD == at)) && [[ $word != -* ]]; then
                COMPREPLY=($(compgen -W "{" ".join(command.verbs)}" -- "$word"))
                return
            fi
            if ((COMP_CWORD > at)); then command="$command ${{COMP_WORDS[at]}}"; fi
            ;;"""


def _values(found: Sequence[Command]) -> list[str]:
    """What is offered after an option that takes a value; files, where the script itself offers nothing."""
    by_offer: dict[str, list[str]] = {}
    for command in found:
        for name, value in command.options.items():
            if value:
                by_offer.setdefault(_offer(value), []).append(f"{command.words} {name}")
    return [_case(patterns, f"{offer}; return" if offer else "return") for offer, patterns in by_offer.items()]


def _offer(value: str) -> str:
    """The command that offers what stands for `value`; "" is for the shell itself, which offers files."""
    if choices(value):
        return f'COMPREPLY=($(compgen -W "{choices(value)}" -- "$word"))'
    if value in FOLDERS:
        return 'COMPREPLY=($(compgen -d -- "$word"))'
    return '_dmltrain_jobs "$word"' if value in JOBS else ""


def _case(patterns: Sequence[str], act: str) -> str:
    return f"        {' | '.join(map(shlex.quote, patterns))}) {act} ;;"


def zsh(found: Sequence[Command]) -> str:
    """The same, by the functions for bash that zsh has."""
    return f"autoload -U +X bashcompinit && bashcompinit\n{bash(found)}"


SHELLS: dict[str, Callable[[Sequence[Command]], str]] = {"bash": bash, "zsh": zsh}
