"""A file of options says what the command line says, and its mistakes have a line; options of other launchers."""

import importlib.util
import re
from pathlib import Path

import pytest

from dmltrain_launch import LaunchError
from dmltrain_launch.command_line import config, old_options
from dmltrain_launch.command_line.old_options import ALIASES, REFUSED, ROWS, mebibytes, unsupported_cluster
from dmltrain_launch.command_line.options import parse
from dmltrain_launch.command_line.table import OPTIONS
from dmltrain_launch.job.job import Setting
from dmltrain_launch.job.options import Options


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
    assert {setting.name: setting.value for setting in options.settings}["HOME"] == "/home/me"


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


# -- every option of dmlc's and MXNet's launchers is ours, works, or is refused with a fix -----------------------------

TABLE = {name: row for row in (*ROWS, *REFUSED) for name in row.names}


def apply(name: str, value: str = "", options: Options | None = None, **environ: str) -> Options:
    return TABLE[name].apply(options or Options(), value, name, environ)


def source(package: str, file: str) -> str:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{package} missing: pip install 'dmltrain[mxnet]'")
    return (Path(spec.submodule_search_locations[0]) / file).read_text()


@pytest.mark.parametrize("package, file, count", [("dmlc_tracker", "opts.py", 30), ("mxnet", "tools/launch.py", 8)])
def test_every_option_of_other_launchers_is_known(package, file, count):
    calls = re.findall(r"add_argument\(\s*((?:'-[-\w]+',\s*)+)", source(package, file))
    names = [name for call in calls for name in re.findall(r"'(-[-\w]+)'", call)]
    assert len(names) >= count, "the source was read"
    ours = {name for option in OPTIONS for name in option.names}
    assert len(ours) == sum(len(option.names) for option in OPTIONS), "no two have one name"
    unknown = {name for name in names if name not in ours and name not in TABLE and name not in ALIASES}
    assert not unknown
    assert set(ALIASES.values()) <= ours, "an alias is of something"


def test_options_take_values_as_in_other_launchers():
    """An option that takes a value there and none here would leave the value as the program's name."""
    text = source("dmlc_tracker", "opts.py")
    for name, row in TABLE.items():
        found = re.search(rf"add_argument\(\s*'{name}',(.*?)\)\n", text, re.DOTALL)
        if found:
            assert bool(row.value) == ("store_true" not in found[1]), name


@pytest.mark.parametrize("role", ["worker", "server"])
def test_cores_are_threads_of_a_role(role):
    before = Options(settings=(Setting("OMP_NUM_THREADS", "9"),))
    after = apply(f"--{role}-cores", "3", before)
    assert after.settings == (*before.settings, Setting("OMP_NUM_THREADS", "3", role))
    for wrong in ("0", "-1", "two", "1.5", ""):
        with pytest.raises(LaunchError, match=f"--{role}-cores is {wrong}: expected a whole number"):
            apply(f"--{role}-cores", wrong)


def test_memory_is_read_as_dmlc_reads_it():
    for text, size in {"4g": 4096, "1G": 1024, "0.5g": 512, "512m": 512, "1.9M": 1, "1.g": 1024}.items():
        assert mebibytes(text) == size
        assert apply("--worker-memory", text).worker_memory == size
        assert apply("--server-memory", text).server_memory == size
    for text in ("", "4", "g", "4k", "-1g", "0.1m", "4gb", "nang", "infg", "1e3m", "1_0g"):
        with pytest.raises(LaunchError, match=r"--worker-memory is .*: expected a number and g"):
            apply("--worker-memory", text)


def test_p3_sets_what_mxnet_sets_and_the_user_wins():
    options = apply("--p3", options=Options(settings=(Setting("DMLC_PS_WATER_MARK", "5"),)))
    values = {setting.name: setting.value for setting in options.settings}  # the last one counts
    assert values == {"DMLC_PS_VAN_TYPE": "p3", "DMLC_PS_WATER_MARK": "5"}
    text = source("mxnet", "tools/launch.py")
    assert "'DMLC_PS_VAN_TYPE=p3 DMLC_PS_WATER_MARK=10'" in text, "what MXNet sets"
    assert {setting.name: setting.value for setting in apply("--p3").settings}["DMLC_PS_WATER_MARK"] == "10"


def test_own_libraries_come_first():
    last = lambda options: options.settings[-1]  # noqa: E731
    assert last(apply("--ship-libcxx", "/opt/gcc/lib")) == Setting("LD_LIBRARY_PATH", "/opt/gcc/lib")
    inherited = apply("--ship-libcxx", "/opt/gcc/lib", LD_LIBRARY_PATH="/a:/b")
    assert last(inherited) == Setting("LD_LIBRARY_PATH", "/opt/gcc/lib:/a:/b")
    given = apply("--ship-libcxx", "lib", Options(settings=(Setting("LD_LIBRARY_PATH", "/c"),)), LD_LIBRARY_PATH="/a")
    assert last(given) == Setting("LD_LIBRARY_PATH", "lib:/c")


def test_values_of_the_launchers_own_lines_the_address_of_this_host_and_the_file_cache():
    assert apply("--log-level", "DEBUG").log_level == "DEBUG"
    assert apply("--host-ip", "10.77.0.254").host_ip == "10.77.0.254"
    assert apply("--host-ip", "FD00::1").host_ip == "fd00::1"
    assert apply("--host-ip", "auto").host_ip == ""
    assert apply("--auto-file-cache", "False") == Options()
    for name, value, said in (
        ("--log-level", "WARN", "--log-level is WARN: expected INFO or DEBUG"),
        ("--host-ip", "login", "--host-ip is login: expected an IP address"),
        ("--auto-file-cache", "True", "--auto-file-cache True: .* --sync-dst-dir DIR"),
        ("--slurm-worker-nodes", "2", "--launcher slurm --submit --slurm-args=--nodes=N"),
        ("--slurm-server-nodes", "2", "--launcher slurm --submit --slurm-args=--nodes=N"),
    ):
        with pytest.raises(LaunchError, match=said):
            apply(name, value)


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row.names[0])
def test_refusals_have_a_reason_and_a_fix(row):
    with pytest.raises(LaunchError) as caught:
        row.apply(Options(), "x" if row.value else "", row.names[0], {})
    purpose, _, fix = str(caught.value).partition("; ")
    assert purpose.startswith(f"{row.names[0]} is for ") and fix
    assert caught.value.code == 2


def test_clusters_of_other_launchers():
    assert "from Mesos; give" in unsupported_cluster("mesos") and "-H" in unsupported_cluster("mesos")
    assert unsupported_cluster("local") == ""
    for given, environ in (("--cluster", {}), ("--launcher", {}), ("", {"DMLC_SUBMIT_CLUSTER": "slurm"})):
        assert parse([*([given, "slurm"] if given else []), "-n", "2", "true"], environ).launcher_name == "slurm"
    with pytest.raises(LaunchError, match="DMLC_SUBMIT_CLUSTER mesos: expected local"):
        parse(["-n", "1", "true"], {"DMLC_SUBMIT_CLUSTER": "mesos"})


def test_the_documentation_has_a_row_for_each():
    rows = dict(old_options.rows())
    own = {row.names[0] for row in (*ROWS, *REFUSED)}
    assert {name.split()[0] for name in rows} - {"--cluster"} == {*ALIASES, *own}
    assert rows["--local-num-attempt"] == "is --max-restarts"
    assert rows["--worker-memory 4g"].startswith("memory limit per worker")
    assert rows["--yarn-app-dir DIR"].startswith("refused: for dmlc's own program for YARN")
    assert rows["--kube-server-image IMAGE"].endswith("--image IMAGE")
    assert rows["--cluster mesos"].startswith("refused: ")
