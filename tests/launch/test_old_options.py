"""Every option of dmlc's and MXNet's launchers is ours, works, or is refused with a fix."""

import importlib.util
import re
from pathlib import Path

import pytest

from launch import LaunchError
from launch.command_line import old_options
from launch.command_line.old_options import ALIASES, REFUSED, ROWS, mebibytes, unsupported_cluster
from launch.command_line.options import parse
from launch.command_line.table import OPTIONS
from launch.job.job import Setting
from launch.job.options import Options

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
    values = {each.name: each.value for each in options.settings}  # the last one counts
    assert values == {"DMLC_PS_VAN_TYPE": "p3", "DMLC_PS_WATER_MARK": "5"}
    text = source("mxnet", "tools/launch.py")
    assert "'DMLC_PS_VAN_TYPE=p3 DMLC_PS_WATER_MARK=10'" in text, "what MXNet sets"
    assert {each.name: each.value for each in apply("--p3").settings}["DMLC_PS_WATER_MARK"] == "10"


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
    assert "Mesos" in unsupported_cluster("mesos") and "-H" in unsupported_cluster("mesos")
    assert unsupported_cluster("local") == ""
    assert parse(["-n", "1", "true"], {"DMLC_SUBMIT_CLUSTER": "local"}).launcher_name == "local"
    with pytest.raises(LaunchError, match="DMLC_SUBMIT_CLUSTER mesos: expected local"):
        parse(["-n", "1", "true"], {"DMLC_SUBMIT_CLUSTER": "mesos"})


def test_the_documentation_has_a_row_for_each():
    rows = dict(old_options.rows())
    own = {row.names[0] for row in (*ROWS, *REFUSED)}
    assert {name.split()[0] for name in rows} - {"--cluster"} == {*ALIASES, *own}
    assert rows["--local-num-attempt"] == "is --max-restarts"
    assert rows["--worker-memory 4g"].startswith("memory limit per worker")
    assert rows["--yarn-app-dir DIR"].startswith("refused: for dmlc's own program for YARN")
    assert rows["--cluster mesos"].startswith("refused: ")


@pytest.mark.parametrize("given", [["--cluster", "slurm"], ["--launcher", "slurm"], []])
def test_slurm_is_chosen_as_in_dmlcs_tracker(given):
    environ = {} if given else {"DMLC_SUBMIT_CLUSTER": "slurm"}
    assert parse([*given, "-n", "2", "true"], environ).launcher_name == "slurm"
