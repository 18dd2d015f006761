"""`dmltrain completion bash|zsh`, in real shells."""

import io
import os
import pty
import re
import shlex
import shutil
import subprocess
from contextlib import redirect_stdout
from pathlib import Path
from unittest import mock

import pytest

from dmltrain.data_command.cli import VERBS as DATA_VERBS
from dmltrain_launch.command_line.job_options import VERBS
from dmltrain_launch.command_line.table import OPTIONS
from dmltrain_launch.commands import completion
from dmltrain_launch.commands.completion import Command, choices, commands
from dmltrain_launch.job.options.option import Option
from tests.scripts import executable
from tests.waiting import wait_for

DOOR = Path(__file__).parents[1] / "launch/bin/dmltrain"
ROOT = Path(__file__).parents[1]
ENTRY = {
    "launch": "dmltrain_launch.cli:main",
    "check": "dmltrain_launch.cli:check_main",
    "job": "dmltrain_launch.cli:job_main",
    "doctor": "dmltrain_launch.commands.doctor:main",
    "completion": "dmltrain_launch.commands.completion:main",
    "parse": "dmltrain.report.cli:main",
    "report": "dmltrain.report.page.cli:main",
    "data": "dmltrain.data_command.cli:main",
    "audit": "dmltrain.audit.cli:main",
    "experiment": "dmltrain.experiment.cli:main",
}
VERBS_HERE = ["audit", "check", "completion", "data", "doctor", "experiment", "job", "launch", "mute", "parse"]
VERBS_HERE += ["report", "zoom"]
PLUGIN = """#!/bin/sh
[ "$1" = --help ] || { echo "$*" > said; exit; }
echo 'usage: dmltrain-zoom [options] PICTURE'
echo
echo '  --by TIMES, -b TIMES   how much'
echo '  --gently               slowly'
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The front door and all programs, and one of somebody else's, as an installation has them."""
    made = tmp_path_factory.mktemp("bin")
    shutil.copy(DOOR, made)
    for verb, entry in ENTRY.items():
        module, _, function = entry.partition(":")
        text = f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nfrom {module} import {function} as main\n"
        executable(made / f"dmltrain-{verb}", f"{text}sys.exit(main())\n")
    (made / "dmltrain-zoom").write_text(PLUGIN)
    (made / "dmltrain-mute").write_text("#!/bin/sh\nexit 1\n")
    for path in made.iterdir():
        path.chmod(0o755)
    return made


def test_the_entry_points_are_the_projects():
    text = (ROOT / "setup.py").read_text()
    assert dict(re.findall(r'"dmltrain-(\w+) = ([\w.:]+)"', text)) == ENTRY


@pytest.fixture(scope="module")
def found(folder) -> list[Command]:
    """All programs' verbs and options; each has been asked for its help."""
    return commands(folder)


@pytest.fixture(scope="module")
def scripts(folder, found) -> dict[str, Path]:
    """By shell, without asking all programs once more."""
    made = {}
    for shell in ("bash", "zsh"):
        made[shell] = folder.parent / f"completion.{shell}"
        made[shell].write_text(printed(shell, found))
    return made


def printed(shell: str, found: list[Command]) -> str:
    with mock.patch.object(completion, "commands", return_value=found), redirect_stdout(io.StringIO()) as out:
        assert completion.complete([shell]) == 0
    return out.getvalue()


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_the_front_door_asks_the_programs_beside_it(folder, tmp_path, shell):
    for name in ("dmltrain", "dmltrain-completion", "dmltrain-mute", "dmltrain-zoom"):
        shutil.copy(folder / name, tmp_path)
    done = subprocess.run([tmp_path / "dmltrain", "completion", shell], capture_output=True, text=True, check=True)
    assert done.stdout == printed(shell, commands(tmp_path)) and "--gently" in done.stdout


OFFERED = [
    (["dmltrain", ""], [*VERBS_HERE, "help", "--help", "--version"]),
    (["dmltrain", "la"], ["launch"]),
    (["dmltrain", "help", "jo"], ["job"]),
    (["dmltrain", "launch", "--num-w"], ["--num-workers"]),
    (["dmltrain", "launch", "--torch-env", ""], ["auto", "on", "off"]),
    (["dmltrain", "check", "--ssh", "s"], ["system"]),
    (["dmltrain", "check", "--kil"], []),
    (["dmltrain", "parse", "--format", "m"], ["markdown"]),
    (["dmltrain", "parse", "--fo"], ["--follow", "--format"]),
    (["dmltrain", "data", "pa"], ["pack", "partition"]),
    (["dmltrain", "data", "pack", "--resi"], ["--resize"]),
    (["dmltrain", "completion", ""], ["bash", "zsh"]),
    (["dmltrain", "job", ""], ["ls", "ps", "logs", "kill", "attach", "add", "remove", "set"]),
    (["dmltrain", "job", "add", "fit-"], ["fit-2"]),
    (["dmltrain", "job", "-"], ["-h", "--help", "--version"]),
    (["dmltrain", "job", "logs", "--f"], ["--follow"]),
    (["dmltrain", "job", "logs", "--follow", ""], ["fit-2", "fit"]),
    (["dmltrain", "job", "kill", "fit-"], ["fit-2"]),
    (["dmltrain-job", "ps", "fit-"], ["fit-2"]),
    (["/some/where/dmltrain-job", "ps", "fit-"], ["fit-2"]),
    (["dmltrain-launch", "--logs", "fit-"], ["fit-2"]),
    (["dmltrain-launch", "--hostfile", "-"], []),
    (["dmltrain", "zoom", "-"], ["--by", "-b", "--gently"]),
    (["dmltrain", "zoom", "--by", "-"], []),
    (["dmltrain", "mute", "-"], []),
    (["dmltrain", "launch", "--log-dir", "lo"], ["logs"]),
]


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_what_is_offered(tmp_path, scripts, shell):
    if not shutil.which(shell):
        pytest.skip(f"no {shell} on this machine")
    for name in ("fit-2", "fit"):
        (tmp_path / "logs" / name).mkdir(parents=True)
        (tmp_path / "logs" / name / "job.json").write_text("{}")
    (tmp_path / "logs/other").mkdir()
    answers = asked(shell, scripts[shell], tmp_path, [words for words, _ in OFFERED])
    for (words, expected), offered in zip(OFFERED, answers, strict=True):
        if shell == "zsh":  # which leaves out by itself what does not begin with the word
            offered = [each for each in offered if each.startswith(words[-1])]
        assert offered == expected, words


HOSTILE = ["r1-$(id>ran)", "r2-`id>ran`", "r3-;id>ran", "r4-a b", "r5-\x1b[2J", "r6-two\nlines", "r7-plain", "r8-*"]


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_jobs_name_is_offered_quoted_and_nothing_in_it_runs(tmp_path, scripts, shell):
    if not shutil.which(shell):
        pytest.skip(f"no {shell} on this machine")
    for name in HOSTILE:
        (tmp_path / "logs" / name).mkdir(parents=True)
        (tmp_path / "logs" / name / "job.json").write_text("{}")
    [offered] = asked(shell, scripts[shell], tmp_path, [["dmltrain", "job", "ps", ""]])
    assert not (tmp_path / "ran").exists()
    said = subprocess.run([shell, "-c", f"printf '%s\\0' {' '.join(offered)}"], cwd=tmp_path, capture_output=True)
    assert said.stdout.decode().split("\0")[:-1] == HOSTILE
    assert not (tmp_path / "ran").exists() and all(each.isprintable() for each in offered)


def asked(shell: str, script: Path, folder: Path, lines: list[list[str]]) -> list[list[str]]:
    """What one shell offers for the last word of each line."""
    ask = "".join(
        f"COMP_WORDS=({shlex.join(words)}); COMP_CWORD={len(words) - 1}; _dmltrain\n"
        "printf '%s\\n' \"${COMPREPLY[@]}\"; echo .\n"
        for words in lines
    )
    if shell == "zsh":
        known = "[[ -n $_comps[dmltrain] ]] || exit 9"
        text = f"autoload -U compinit; compinit -u -D; source {script}; {known}\n() {{ emulate -L ksh\n{ask}\n}}"
        command = ["zsh", "-f", "-c", text]
    else:
        known = "complete -p dmltrain dmltrain-job >/dev/null || exit 9"
        command = ["bash", "--norc", "-c", f"source {script}; {known}; {ask}"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not done.stderr, done
    parts = done.stdout.split("\n.\n")[:-1]
    return [[line.strip() for line in part.splitlines() if line.strip()] for part in parts]


def test_all_options_of_the_tables_are_known(found):
    found = {each.words: each for each in found}

    def of(rows: list[Option]) -> dict[str, str]:
        return {name: row.value for row in rows for name in row.names}

    assert found["launch"].options == of(list(OPTIONS))
    assert {f"job {verb}" for verb in VERBS} == {words for words in found if words.startswith("job ")}
    assert {f"data {verb}" for verb in DATA_VERBS} == {words for words in found if words.startswith("data ")}
    for verb, row in VERBS.items():
        named = [option for option in OPTIONS if set(option.names) & {*row.options, "--help"}]
        assert found[f"job {verb}"].options == of(named)
    names = {name for name in found["parse"].options if name.startswith("--")}
    table = {"--summary", "--compare", "--x", "--wide", "--follow", "--format", "--aggregate", "--metric-names"}
    assert names == {"--help", "--plot", *table}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        *(("auto|on|off", "auto on off"), ("{mean,max}", "mean max")),
        *((value, "") for value in ("FILE", "NAME [NAME ...]", "K[=V]", "A:2,B:4")),
    ],
)
def test_choices_of_a_value(value, words):
    assert choices(value) == words


@pytest.mark.parametrize("command", [["bash", "--norc", "--noprofile"], ["zsh", "-f"]], ids=["bash", "zsh"])
def test_tab_in_an_interactive_shell(folder, scripts, tmp_path, command):
    """A shell on a terminal of its own: one TAB completes the verb, the next one the option."""
    shell = command[0]
    if not shutil.which(shell):
        pytest.skip(f"no {shell} on this machine")
    load = "autoload -U compinit; compinit -u -D; " if shell == "zsh" else ""
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(tmp_path)
        os.environ.update(PATH=f"{folder}:{os.environ['PATH']}", TERM="dumb", HISTFILE="")
        os.execvp(shell, command)
    try:
        os.write(terminal, f"{load}source {scripts[shell]}\n".encode())
        os.write(terminal, b"dmltrain zo\t--ge\tnow\n")
        said = tmp_path / "said"
        wait_for(lambda: said.exists() and said.read_text(), "the command that was typed")
        assert said.read_text() == "--gently now\n"
    finally:
        os.close(terminal)
        os.waitpid(child, 0)


@pytest.mark.parametrize("words", [[], ["fish"], ["bash", "zsh"]])
def test_a_wrong_shell(folder, words):
    done = subprocess.run([folder / "dmltrain", "completion", *words], capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "dmltrain-completion: error: expected one shell, bash or zsh: dmltrain completion bash\n"
