"""`dmltrain-launch --wire`: whole jobs with each level of protection, over TCP."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from dmltrain.backends.mxnet import ps_lite
from dmltrain.base.env import Environment, read
from dmltrain.base.errors import UserError
from dmltrain.kvstore.transport import tls
from tests.copied_tree import search_path
from tests.forked_job import PLAIN, forked

ROOT = Path(__file__).parents[1]
PROGRAM = ROOT / "tests/kvstore/programs/transport.py"
LEVELS = ("plain", "auth", "tls")


def launch(folder, level, *program):
    words = f"-m dmltrain_launch.cli --launcher local -n 2 -s 1 --wire {level} --log-dir logs"
    return subprocess.Popen(
        [sys.executable, *words.split(), *map(str, program)],
        env={**os.environ, "PYTHONPATH": search_path()},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=folder,
        text=True,
    )


def test_each_level_gives_the_same_values_and_leaves_no_secret(tmp_path):
    """The jobs run side by side."""
    for level in LEVELS:
        (tmp_path / level).mkdir()
    program = forked(PROGRAM, "tcp", "tcp", "none", 1, 4, "", backend=PLAIN)
    jobs = {level: launch(tmp_path / level, level, *program) for level in LEVELS}
    results = {}
    for level, job in jobs.items():
        output, _ = job.communicate(timeout=100)
        assert job.returncode == 0, output
        files = {path.name: path.read_text() for path in (tmp_path / level / "logs").iterdir()}
        assert not [name for name, text in files.items() if "PRIVATE KEY" in text or "BEGIN CERTIFICATE" in text]
        (line,) = [line for line in files["worker-0.log"].splitlines() if line.startswith("{")]
        results[level] = json.loads(line)
    assert len({result["digest"] for result in results.values()}) == 1
    sent = {level: result["sent"] for level, result in results.items()}
    assert sent["auth"] > sent["plain"] == sent["tls"], "seals are there with auth only; what TLS adds is not counted"


SHOW = """import os, time
from dmltrain import kvstore
store = kvstore.create("dist_sync", transport="tcp")
path = os.environ["DMLTRAIN_CERTIFICATE_FILE"]
print("kept in", path, oct(os.stat(path).st_mode & 0o777), flush=True)
store.barrier()
store.close()
"""


def test_the_certificate_is_private_and_goes_with_the_job(tmp_path):
    (tmp_path / "show.py").write_text(SHOW)
    job = launch(tmp_path, "tls", "show.py")
    output, _ = job.communicate(timeout=60)
    assert job.returncode == 0, output
    (line, _) = [line for line in output.splitlines() if "kept in " in line]
    path, mode = line.rpartition("kept in ")[2].split()
    assert mode == "0o600" and not Path(path).exists()
    assert not any("PRIVATE KEY" in " ".join(each.info["cmdline"] or ()) for each in psutil.process_iter(["cmdline"]))


@pytest.mark.parametrize(
    "environment, said",
    [
        ({"DMLTRAIN_WIRE": "none"}, "DMLTRAIN_WIRE='none': expected one of plain, auth, tls"),
        ({"DMLTRAIN_WIRE": "tls"}, "DMLTRAIN_CERTIFICATE_FILE='' cannot be read; dmltrain-launch --wire tls makes"),
        ({"DMLTRAIN_WIRE": "tls", "DMLTRAIN_CERTIFICATE_FILE": __file__}, f"DMLTRAIN_CERTIFICATE_FILE={__file__}: "),
    ],
)
def test_a_level_without_what_it_needs_is_a_users_error(environment, said):
    job = {"DMLC_ROLE": "worker", "DMLC_NUM_WORKER": "1", "DMLC_NUM_SERVER": "1", "DMLC_PS_ROOT_PORT": "1"}
    with pytest.raises(UserError) as raised:
        tls.context(read({**job, **environment}).certificate_file, False)
    assert said in str(raised.value)


@pytest.mark.parametrize(
    "source, options, code, said",
    [
        ("import mxnet\n", ("--wire", "auth"), 2, "program.py uses MXNet, whose parameter server can neither"),
        ("import mxnet\nimport dmltrain\n", ("--wire", "auth", "--dry-run"), 0, ""),
        ("import mxnet\n", ("--wire", "plain", "--dry-run"), 0, ""),
        ("pass\n", ("--wire", "tls"), 0, "program.py does not import dmltrain itself: --wire tls protects only what"),
        ("pass\n", ("--wire", "none"), 2, "--wire none: expected one of plain, auth, tls"),
    ],
)
def test_a_program_that_cannot_be_protected_is_refused_or_warned_about(tmp_path, source, options, code, said):
    (tmp_path / "program.py").write_text(source)
    words = "-m dmltrain_launch.cli --launcher local -n 1 -s 1"
    command = [sys.executable, *words.split(), *options, "program.py"]
    variables = {**os.environ, "PYTHONPATH": search_path()}
    found = subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (found.returncode, "Traceback" in found.stderr) == (code, False), found
    assert said in found.stdout + found.stderr


@pytest.mark.parametrize("level", LEVELS)
def test_a_store_of_mxnet_needs_the_level_plain(level):
    job = Environment(num_workers=1, num_servers=1, wire=level, launched=True)
    with contextlib.nullcontext() if level == "plain" else pytest.raises(UserError, match="ps-lite.* can neither"):
        ps_lite.check(job)
