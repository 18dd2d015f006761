"""Running cells: through the launcher, interrupted in every way, with failing cells and a full disk."""

import json
import os
import signal
import subprocess

import pytest

from tests.experiment.conftest import alive
from tests.running_job import ROOT
from tests.waiting import wait_for

LIGHT = "program: light.py\nlaunch: {workers: 1, servers: 0}\n"
WAITS = LIGHT + "grid: {value: [a, b]}\noptions: {wait: \"{'go' if value == 'b' else ''}\"}\n"


def test_a_cell_that_fails_is_an_error_and_the_rest_runs_on(place):
    place.write(LIGHT + "grid: {value: 1, fail: ['yes', 'no']}\n")
    done = place.run("x.yaml", code=1)
    assert "[1/2] value=1,fail=yes: error after" in done.stdout and "[2/2] value=1,fail=no: done after" in done.stdout
    assert "no such thing as 1; log: cells/value=1,fail=yes/worker-0.log" in done.stdout
    assert "2 cells: 1 done, 1 error; results in logs/experiments/x\n" in done.stdout
    first = place.job("value=1,fail=no")["started"]

    again = place.run("x.yaml", code=1)
    assert "0 to run" in again.stdout and "1 cells failed earlier: --retry runs them again" in again.stderr
    (place.folder / "light.py").write_text("print('mended')\n")
    assert "2 cells: 2 done" in place.run("x.yaml", "--retry").stdout
    assert place.job("value=1,fail=no")["started"] == first
    assert (place.cell("value=1,fail=yes") / "previous-1/worker-0.log").exists()


@pytest.mark.thorough
def test_a_signal_ends_the_cells_and_the_next_run_goes_on(place):
    place.write(WAITS)
    process = place.start("x.yaml")
    (pid,) = wait_for(lambda: place.pids("b"), "cell b runs")
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "value=b: interrupted after" in out
    assert "interrupted: start it again to go on" in err and "2 cells: 1 done, 1 pending" in out
    assert not alive(pid)
    (place.folder / "go").touch()
    assert "[1/1] value=b: done" in place.run("x.yaml").stdout
    assert len(place.pids("a")) == 1


def test_kill_9_of_the_experiment_ends_its_cell_and_the_next_run_goes_on(place):
    place.write(WAITS)
    process = place.start("x.yaml")
    (pid,) = wait_for(lambda: place.pids("b"), "cell b runs")
    process.kill()
    process.communicate(timeout=60)
    wait_for(lambda: not alive(pid), "the end of cell b")  # which would else be done as soon as it may go
    (place.folder / "go").touch()
    assert "[1/1] value=b: done" in place.run("x.yaml").stdout  # it waits for the launcher of the earlier run
    assert not alive(pid) and len(place.pids("a")) == 1 and len(place.pids("b")) == 2


@pytest.mark.thorough
def test_two_at_a_time_are_refused_and_kill_9_of_a_launcher_leaves_no_process(place):
    place.write(WAITS)
    process = place.start("x.yaml")
    (pid,) = wait_for(lambda: place.pids("b"), "cell b runs")
    refused = place.run("x.yaml", code=2)
    assert f"another dmltrain-experiment works there (process {process.pid} on " in refused.stderr
    assert "2 cells: 1 done, 1 pending" in place.run("x.yaml", "--status").stdout
    os.kill(place.job("value=b")["launched_from"]["pid"], signal.SIGKILL)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "value=b: error after" in out and "the launcher was ended by SIGKILL; logs: cells/value=b" in out
    assert not alive(pid)


@pytest.mark.thorough
def test_cells_run_side_by_side_where_this_is_wanted(place):
    """Each waits for the other's file."""
    other = "\"{'started/b-go' if value == 'a' else 'started/a-go'}\""
    place.write(LIGHT + f"grid: {{value: [a, b]}}\noptions: {{wait: {other}}}\n")
    process = place.start("x.yaml", "--at-once", "2")
    wait_for(lambda: place.pids("a") and place.pids("b"), "both cells run")
    for name in ("a-go", "b-go"):
        (place.folder / "started" / name).touch()
    process.communicate(timeout=60)
    assert process.returncode == 0


@pytest.mark.thorough
def test_the_folder_of_another_file(place):
    place.write(LIGHT + "grid: {value: [1, 2]}\noptions: {fail: 'no'}\n")
    place.run("x.yaml")
    place.write(LIGHT + "title: The table may change\ngrid: {value: [1, 2]}\noptions: {fail: 'no'}\ntime-limit: 99\n")
    assert "0 to run" in place.run("x.yaml").stdout
    changed = "has the results of another experiment, x: options fail was no, is never; "
    assert changed in place.run("x.yaml", "--set", "fail=never", code=2).stderr
    status = place.run("x.yaml", "--set", "fail=never", "--status")
    assert changed in status.stderr and "2 cells: 2 pending" in status.stdout
    place.write(LIGHT + "grid: {value: [2, 3, 4]}\noptions: {fail: 'no'}\n")
    refused = place.run("x.yaml", code=2).stderr
    assert "logs/experiments/x has the results of another experiment, x: " in refused
    assert "2 cells are new, 1 are gone, 1 have the same name" in refused and "--add keeps" in refused
    assert len(place.pids("2")) == 1
    assert "2 to run" in place.run("x.yaml", "--add").stdout and len(place.pids("2")) == 1
    place.write(LIGHT + "grid: {value: [2, 3, 4]}\noptions: {fail: 'yes'}\n")
    assert "options fail was no, is yes" in place.run("x.yaml", code=2).stderr
    assert "[3/3]" in place.run("x.yaml", "--add", code=1).stdout
    place.run("x.yaml", "--output", "elsewhere", "--only", "value=2", code=1)
    assert (place.folder / "elsewhere/cells/value=2/job.json").exists()


@pytest.mark.thorough
def test_all_problems_are_reported_together_and_nothing_starts(place):
    (place.folder / "train.py").write_text("import sys\nfrom dmltrain import fit\nsys.exit(fit.main())\n")
    place.write(
        "program: train.py\nlaunch: {servers: 0, workers: 1}\n"
        "options: {dataset: digits, network: resnet, num-layers: 8}\n"
        "grid:\n- {lr: [0.1, fast]}\n- {num-layers: [9, 8], wd: [1, 2]}\n- {kv-store: dist_sync}\n- {launcher: cloud}\n"
        "- {devices: 'gpu:16'}\n- {data-train: gone.rec}\n- {model-prefix: m, num-epochs: 900000000000}\n"
    )
    refused = place.run("x.yaml", code=2).stderr
    for expected in (
        "x.yaml: nothing was started:",
        "- --lr: 'fast' is not a number of at least 0 (cell lr=fast)",
        "- no resnet of 9 layers",
        "(cells num-layers=9,wd=1, num-layers=9,wd=2)",
        "- dmltrain-launch: error: --launcher cloud: expected",
        "- kv-store dist_sync needs servers and the job has none",
        "- --data-train gone.rec: no such file",
        "MiB: free some space",
    ):
        assert expected in refused, refused
    assert "16 GPUs are needed" in refused or "the number of GPUs of this machine is not known" in refused
    assert not (place.folder / "logs/experiments/x/cells").exists()


@pytest.mark.thorough
def test_more_than_200_cells_need_a_word(place):
    place.write(LIGHT + f"grid: {{value: {list(range(15))}, fail: {list(range(15))}}}\n")
    refused = place.run("x.yaml", code=2).stderr
    assert "x.yaml has 225 cells: more than 200 are run with --yes only" in refused
    assert not (place.folder / "logs").exists()
    assert place.run("x.yaml", "--dry-run").stdout.count("dmltrain-launch") == 225
    assert "[1/1] value=7,fail=5" in place.run("x.yaml", "--only", "value=7", "--only", "fail == 5").stdout


@pytest.mark.thorough
@pytest.mark.skipif(os.getuid() != 0, reason="mounting needs root")
def test_a_full_disk_ends_the_experiment_which_then_goes_on(place):
    results = place.folder / "logs"
    results.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", results], capture_output=True)
    if mounted.returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        place.write(LIGHT + "grid: {value: [a, b, c]}\noptions: {fill: \"{30 if value == 'b' else ''}\"}\n")
        refused = place.run("x.yaml", code=2).stderr
        assert "the disk of logs/experiments/x is full" in refused and "cell value=b needs at least 8 MiB" in refused
        assert "free some space and start again" in refused
        assert "3 cells: 1 done, 2 pending" in place.run("x.yaml", "--status").stdout
        assert json.loads((results / "experiments/x/experiment.json").read_text())["name"] == "x"
        for log in place.cell("value=b").glob("**/*.log"):
            log.write_text("")
        (place.folder / "light.py").write_text("print('mended')\n")
        assert "3 cells: 3 done" in place.run("x.yaml").stdout
        assert len(place.pids("a")) == 1
    finally:
        subprocess.run(["umount", "-l", results], check=True)


@pytest.mark.thorough
def test_real_training_its_tables_and_their_remaking(place):
    place.write(
        f"program: {ROOT}/examples/train_digits.py\n"
        "launch: {workers: 1, servers: 0}\noptions: {num-examples: 64, num-epochs: 1, kv-store: local}\n"
        "seeds: 1\ncolumns: [network, last_accuracy]\n"
    )
    forecast = place.run("x.yaml", "--forecast").stdout
    assert "2 steps of " in forecast and "1 cells: about " in forecast
    place.run("x.yaml")
    folder = place.folder / "logs/experiments/x"
    rows = json.loads((folder / "results.json").read_text())["rows"]
    assert [(row["seeds"], row["status"], row["settings"]) for row in rows] == [(1, "done", {})]
    before = {path: path.read_bytes() for path in folder.glob("*.*")}
    names = {"experiment.json", "results.json", "table.md", "table.csv", "table.tex", "report.html"}
    assert {path.name for path in before} >= names
    place.run("x.yaml", "--remake")
    assert {path: path.read_bytes() for path in folder.glob("*.*")} == before
    assert place.run("x.yaml", "--forecast").stdout == "all cells are done\n"
