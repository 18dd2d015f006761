"""A file of options says what the command line says, and its mistakes have a line."""

import pytest

from launch import LaunchError
from launch.command_line import config
from launch.command_line.options import parse
from launch.command_line.table import OPTIONS
from launch.job.options import Options


def write(tmp_path, text: str) -> str:
    path = tmp_path / "job.yaml"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    return str(path)


def trial(row, name, value):
    row.apply(Options(), value, name, {"HOME": "/home/me"})


def test_a_file_gives_the_same_options_as_the_command_line(tmp_path):
    path = write(
        tmp_path,
        """
# a job
num-workers: 5:6
--num_servers: 3
env: {A: b, C: "d e", LR: 0.10, EMPTY: "", HOME: , ON: on, T: 22:30}
env_worker: [OMP_NUM_THREADS:3, X=y]
quiet: true
elastic: true
min_workers: 2
restart_workers: 3
wait_for_hosts: 60
restart-scheduler: 0
restart-servers: 2
no-live: false
job: on
timeout: 1e3
program: [train.py, --lr, 0.1, "a b", -n, 7, "", true]
""",
    )
    words = config.arguments(path, OPTIONS, trial)
    assert words == [
        *("--num-workers", "5:6", "--num-servers", "3"),
        *("--env", "A=b", "--env", "C=d e", "--env", "LR=0.10", "--env", "EMPTY=", "--env", "HOME"),
        *("--env", "ON=on", "--env", "T=22:30"),
        *("--env-worker", "OMP_NUM_THREADS:3", "--env-worker", "X=y", "--quiet"),
        *("--elastic", "--min-workers", "2", "--restart-workers", "3", "--wait-for-hosts", "60"),
        *("--restart-scheduler", "0", "--restart-servers", "2", "--job", "on", "--timeout", "1e3"),
        *("--", "train.py", "--lr", "0.1", "a b", "-n", "7", "", "true"),
    ]
    options = parse(words, {"HOME": "/home/me"})
    assert options.wait_for_hosts == 60
    assert options.elastic and (options.min_workers, options.restart_workers) == (2, 3)
    assert (options.restart_scheduler, options.restart_servers) == (0, 2)
    assert (options.num_workers, options.most_workers) == (5, 6)
    assert options.quiet and options.live and options.timeout == 1000
    assert options.program == ("train.py", "--lr", "0.1", "a b", "-n", "7", "", "true")
    assert {each.name: each.value for each in options.settings}["HOME"] == "/home/me"


def test_every_yaml_spelling_of_true_sets_an_option_and_of_false_leaves_it_out(tmp_path):
    for words, expected in (("true True TRUE yes Yes on ON", ["--quiet"]), ("false False FALSE no No off OFF", [])):
        for word in words.split():
            assert config.arguments(write(tmp_path, f"quiet: {word}\n"), OPTIONS, trial) == expected, word


def test_short_names_and_a_program_in_one_line(tmp_path):
    path = write(tmp_path, "n: 2\n-s: 1\nprogram: python -m train --name 'a b' \"$x\" | tee\n")
    expected = ["--num-workers", "2", "--num-servers", "1", "--", "python", "-m", "train", "--name"]
    assert config.arguments(path, OPTIONS) == [*expected, "a b", "$x", "|", "tee"]


def test_the_command_line_overrides_the_file(tmp_path):
    path = write(tmp_path, "num-workers: 5\nnum-servers: 3\nprogram: train.py --lr 1\n")
    options = parse(["-n", "2", "--config", path], {})
    assert (options.num_workers, options.num_servers, options.program) == (2, 3, ("train.py", "--lr", "1"))
    options = parse(["-n", "2", "--config", path, "other.py", "-n", "9"], {})
    assert (options.num_workers, options.num_servers, options.program) == (2, 3, ("other.py", "-n", "9"))


@pytest.mark.parametrize(
    "text, message",
    [
        ("num-workers: 5\nnum-wrokers: 6\n", r"job.yaml:2: unknown option 'num-wrokers'; did you mean num-workers\?"),
        ("n: 5\nxyzzy: 6\n", r"job.yaml:2: unknown option 'xyzzy'; expected one of .*num-workers.*program"),
        ("? [a]\n: b\n", r"job.yaml:1: unknown option ''"),
        ("n: 5\n\nnum_workers: 6\n", r"job.yaml:3: num-workers is given twice, first in line 1"),
        ("{n: 5, n: 6}", r"job.yaml:1: n is given twice"),
        ("program: a\nprogram: b\n", r"job.yaml:2: program is given twice, first in line 1"),
        ("config: other.yaml\n", r"job.yaml:1: config is only for the command line"),
        ("quiet: 3\n", r"job.yaml:1: --quiet takes no value: expected true or false"),
        ("quiet: [true]\n", r"job.yaml:1: --quiet takes no value: expected true or false"),
        ("num-workers: {a: 5}\n", r"job.yaml:1: --num-workers takes no mapping: expected N"),
        ("num-workers: five\n", r"job.yaml:1: --num-workers is five: expected a whole number, 1 or more"),
        ("job:\n", r"job.yaml:1: missing value: expected --job NAME"),
        ("env:\n  - A=b\n  - [C]\n", r"job.yaml:3: unexpected list: expected a word or number for each --env K\[=V\]"),
        ("env:\n  A: b\n  C: {d: e}\n", r"job.yaml:3: unexpected mapping: expected a value for C"),
        ("env:\n  - A=b\n  - 1bad=x\n", r"job.yaml:3: --env 1bad: expected NAME=VALUE"),
        ("env: {DMLC_ROLE: worker}\n", r"job.yaml:1: --env DMLC_ROLE: the launcher sets this"),
        ("program: 'a \"b'\n", r"job.yaml:1: program: no closing quotation"),
        ("program: []\n", r"job.yaml:1: program is empty"),
        ("program: ''\n", r"job.yaml:1: program is empty"),
        ("program: {a: b}\n", r"job.yaml:1: unexpected mapping: expected a list of arguments"),
        ("n: 5\nprogram: [a, [b]]\n", r"job.yaml:2: unexpected list"),
        ("n: 5\n\tquiet: true\n", r"job.yaml:2: invalid YAML: "),
        ("- n\n", r"job.yaml:1: expected lines such as"),
        ("", r"job.yaml:1: expected lines such as"),
        ("a: \0", r"job.yaml: invalid YAML: "),
        ("a: \udcff", r"job.yaml: not UTF-8 at byte 3"),
        ("n: 5\n---\nn: 6\n", r"job.yaml:\d: invalid YAML: "),
        ("<<: {n: 5}\n", r"job.yaml:1: unknown option '<<'"),
        ("env: &a [*a]\n", r"job.yaml:1: unexpected list"),
    ],
)
def test_errors_have_a_line_number(tmp_path, text, message):
    with pytest.raises(LaunchError, match=message) as caught:
        config.arguments(write(tmp_path, text), OPTIONS, trial)
    assert caught.value.code == 2


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(LaunchError, match=r"cannot read .*absent.yaml: No such file"):
        config.arguments(str(tmp_path / "absent.yaml"), OPTIONS)
    with pytest.raises(LaunchError, match=r"cannot read .*: Is a directory"):
        config.arguments(str(tmp_path), OPTIONS)
