"""`dmltrain VERB`: which program it runs, and its error if there is none."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.scripts import shell_script

DOOR = Path(__file__).parents[1] / "launch/bin/dmltrain"
DOOR_SECONDS = 0.01  # an interpreter of Python alone takes twice as long


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The front door with two verbs of its own, in a folder whose name has a space; nothing else is in PATH."""
    made = tmp_path / "a folder"
    made.mkdir()
    shutil.copy(DOOR, made)
    says = 'if [ "$*" = --version ]; then echo dmltrain-launch 7.8.9; else printf "<%s>\\n" "$@"; fi'
    shell_script(made / "dmltrain-launch", says)
    shell_script(made / "dmltrain-zoom", "exit 3")
    return made


def run(door: Path | str, *words: str, **more) -> subprocess.CompletedProcess:
    return subprocess.run([door, *words], capture_output=True, text=True, env={"PATH": os.defpath}, **more)


def test_arguments_and_exit_code_belong_to_the_verb(folder):
    words = ["a  b", "*", "", "--help", "$HOME", "\\n", "-"]
    done = run(folder / "dmltrain", "launch", *words)
    assert done.stdout == "".join(f"<{word}>\n" for word in words)
    assert (done.returncode, done.stderr) == (0, "")
    assert run(folder / "dmltrain", "zoom").returncode == 3


def test_the_verb_replaces_the_process_of_the_front_door(folder):
    """It is the same process: signals reach the verb, and its end by a signal is visible."""
    shell_script(folder / "dmltrain-wait", "echo $$; kill -STOP $$; exit 1")
    process = subprocess.Popen([folder / "dmltrain", "wait"], stdout=subprocess.PIPE, text=True)
    assert process.stdout and int(process.stdout.readline()) == process.pid
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    process.send_signal(signal.SIGUSR1)
    process.send_signal(signal.SIGCONT)
    assert process.wait() == -signal.SIGUSR1
    process.stdout.close()


def test_no_signal_is_ignored_or_blocked_on_the_way(folder):
    # SigQ counts the signals that wait for any process of this user: other tests change it
    shell_script(folder / "dmltrain-status", "exec grep -E '^Sig(Pnd|Blk|Ign|Cgt)' /proc/self/status")
    direct = subprocess.run([folder / "dmltrain-status"], capture_output=True)
    assert b"SigIgn" in direct.stdout
    assert subprocess.run([folder / "dmltrain", "status"], capture_output=True).stdout == direct.stdout


def test_verbs_are_searched_beside_the_front_door_and_not_in_path(folder, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shell_script(elsewhere / "dmltrain-other", "echo wrong")
    shell_script(elsewhere / "dmltrain-zoom", "echo wrong")
    (elsewhere / "link").symlink_to(folder / "dmltrain")
    variables = {"PATH": f"{elsewhere}:{os.defpath}"}
    assert subprocess.run([elsewhere / "link", "zoom"], env=variables).returncode == 3
    assert subprocess.run([folder / "dmltrain", "other"], env=variables, capture_output=True).returncode == 2


@pytest.mark.parametrize("command", [["./dmltrain", "zoom"], ["sh", "dmltrain", "zoom"], ["bash", "dmltrain", "zoom"]])
def test_a_relative_path_to_the_front_door(folder, command):
    assert subprocess.run(command, cwd=folder).returncode == 3


@pytest.mark.parametrize("words", [(), ("help",), ("--help",), ("-h",), ("help", "help")])
def test_without_arguments_it_lists_the_verbs(folder, words):
    (folder / "dmltrain-note").write_text("not executable")
    (folder / "dmltrain-folder").mkdir()
    done = run(folder / "dmltrain", *words)
    launch, zoom = (line for line in done.stdout.splitlines() if line.startswith("  "))
    assert launch == "  launch       start a job on this machine or on many hosts"
    assert zoom == "  zoom         (see dmltrain help zoom)"
    assert (done.returncode, done.stderr) == (0, "")


def test_help_of_a_verb_is_printed_by_the_verb_and_the_version_is_the_launchers(folder):
    assert run(folder / "dmltrain", "help", "launch").stdout.endswith("<--help>\n")
    wrong = run(folder / "dmltrain", "help", "lunch")
    assert wrong.returncode == 2 and "unknown verb 'lunch'; did you mean launch?" in wrong.stderr
    assert run(folder / "dmltrain", "--version").stdout == "dmltrain 7.8.9\n"
    (folder / "dmltrain-launch").unlink()
    assert run(folder / "dmltrain", "--version").returncode != 0


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("lunch", "unknown verb 'lunch'; did you mean launch? the verbs are launch, zoom"),
        ("la", "unknown verb 'la'; did you mean launch? the verbs are launch, zoom"),
        ("zoo", "unknown verb 'zoo'; did you mean zoom? the verbs are launch, zoom"),
        ("somersault", "unknown verb 'somersault'; the verbs are launch, zoom"),
        ("", "unknown verb ''; the verbs are launch, zoom"),
        ("../launch", "unknown verb '../launch'; the verbs are launch, zoom"),
        ("-n", "unknown option -n; the options of a verb come after it, as in dmltrain launch -n"),
    ],
)
def test_an_unknown_verb(folder, word, message):
    done = run(folder / "dmltrain", word)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.splitlines()[0] == f"dmltrain: error: {message}"


def test_it_takes_at_most_a_hundredth_of_a_second(folder):
    """The best of several, because other processes use this machine too."""
    best = DOOR_SECONDS
    for _ in range(50):
        began = time.perf_counter()
        run(folder / "dmltrain", "zoom")
        best = min(best, time.perf_counter() - began)
    assert best < DOOR_SECONDS
