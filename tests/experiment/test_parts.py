"""The parts of an experiment: choice of cells, hosts side by side, states from files, forecasts, differences."""

import io
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dmltrain.base.errors import UserError
from dmltrain.base.launcher import launcher
from dmltrain.experiment import check, cli, forecast, launch, text
from dmltrain.experiment.hosts import Hosts, names_hosts
from dmltrain.experiment.launch import reason
from dmltrain.experiment.plan.cell import Cell, cells
from dmltrain.experiment.plan.difference import of_records
from dmltrain.experiment.plan.file import parse
from dmltrain.experiment.plan.select import chosen
from dmltrain.experiment.program import Program, uses_dmltrain
from dmltrain.experiment.result import DONE, PENDING, Result
from dmltrain.experiment.store import DiskFull, Store, disk, identity, state
from dmltrain.experiment.text import duration
from dmltrain.report.runs import job_record
from dmltrain.report.runs.job_record import JobRecord
from tests.scripts import shell_script

EXPERIMENT = parse(b"program: t.py\ngrid: {lr: [0.1, 0.2], devices: [1, 2]}\nseeds: [0, 1]", Path("x.yaml"))
CELLS = cells(EXPERIMENT, None).all


@pytest.mark.parametrize(
    ("only", "count"),
    [
        *(((), 8), (("lr=0.10",), 4), (("lr=0.1,devices=2",), 2), (("lr=0.1,devices=2,seed=1",), 1)),
        *((("devices > 1 and seed == 0",), 2), (("lr=0.2", "seed=1"), 2), (("lr=3",), "no cell is meant")),
        (("device=1",), "expected name=value"),
        (("device > 1",), "no variable device, .*devices, lr, seed"),
        (("lr /",), "is no expression"),
    ],
)
def test_only(only, count):
    if isinstance(count, int):
        assert len(chosen(CELLS, only)) == count
        return
    with pytest.raises(UserError, match=count):
        chosen(CELLS, only)


@pytest.mark.thorough
def test_cells_side_by_side_share_no_host(tmp_path, monkeypatch):
    """The launcher's own placement decides."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.py").touch()
    (tmp_path / "hosts").write_text("a\nb\nc\nd\ne\n")
    hosts = Hosts(lambda words: launch.plan(launcher(), words, ["t.py"]))
    words = ("-n", "2", "-s", "0", "-H", "hosts")
    assert hosts.take("1", words) == words and hosts.used["1"] == {"a", "b"}
    assert hosts.take("2", words) == (*words, "--exclude", "a,b") and hosts.used["2"] == {"c", "d"}
    assert hosts.take("3", words) is None  # both workers would share e
    assert hosts.take("4", ("-n", "1", "-s", "0", "-H", "hosts")) and hosts.used["4"] == {"e"}
    assert hosts.take("5", ("-n", "1", "-s", "0", "-H", "hosts")) is None
    hosts.give_back("1")
    assert hosts.take("3", words) == (*words, "--exclude", "c,d,e") and hosts.used["3"] == {"a", "b"}
    assert hosts.take("6", ("-n", "9", "-s", "0")) == ("-n", "9", "-s", "0")  # this machine
    assert names_hosts(("-Hhosts",)) and names_hosts(("--hosts=a,b",)) and not names_hosts(("-n", "2"))


def test_the_launcher_says_why_there_is_no_place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text("a slots=1\n")
    found = launch.plan(launcher(), ("-n", "2", "-s", "0", "-H", "hosts"), ["t.py"])
    assert found.error.startswith("dmltrain-launch: error: -n 2: the hosts have slots for 1 worker")
    assert launcher() == str(Path(sys.executable).parent / "dmltrain-launch")


def test_the_state_of_a_cell_follows_from_its_files():
    cell = identity(EXPERIMENT, CELLS[0])
    ended, nothing = JobRecord(exit_code=0, seconds=90.0), JobRecord()
    assert state(cell, cell, ended, {}) == ("done", "", 90.0)
    assert state(cell, cell, JobRecord(exit_code=143), {}) == ("pending", "", None)
    assert state(cell, cell, nothing, {}) == ("pending", "", None)
    assert state(cell, cell, JobRecord(exit_code=3), {"error": "why"}) == ("error", "why", None)
    assert state(cell, cell, nothing, {"error": 3})[0] == "error"
    assert state(cell, {**cell, "workers": 2}, ended, {}) == ("pending", "", None)
    assert state(cell, cell, job_record.parse("", b'{"exit_code": false, "seconds": true}'), {})[0] == "pending"
    for seconds in ("1" + "0" * 30, "1e308", "Infinity", "NaN", "-1"):
        record = job_record.parse("", f'{{"exit_code": 0, "seconds": {seconds}}}'.encode())
        assert state(cell, cell, record, {}) == ("done", "", None)


def test_a_store_reads_what_it_wrote(tmp_path):
    store = Store(tmp_path)
    store.begin(EXPERIMENT, CELLS[0])
    (store.path(CELLS[0]) / "worker-0.log").touch()  # of a launcher that had no room for its job.json
    store.fail(CELLS[0], "no room")
    assert store.result(EXPERIMENT, CELLS[0]).error == "no room"
    store.begin(EXPERIMENT, CELLS[0])
    assert store.result(EXPERIMENT, CELLS[0]).status == PENDING
    assert not list(store.path(CELLS[0]).glob("*.log"))
    (store.path(CELLS[0]) / "cell.json").unlink()
    os.mkfifo(store.path(CELLS[0]) / "cell.json")
    assert store.result(EXPERIMENT, CELLS[0]).status == PENDING, "a pipe keeps nobody waiting"
    with pytest.raises(DiskFull, match="cannot be written: No such file or directory$"), disk(tmp_path):
        (tmp_path / "none" / "x").write_text("")


def test_an_earlier_run_of_a_cell_is_never_taken_for_the_one_that_begins(tmp_path):
    """Its launcher may end before it moves what an earlier one left."""
    store = Store(tmp_path)
    path = store.path(CELLS[0])
    for number in (1, 2):
        store.begin(EXPERIMENT, CELLS[0])
        (path / "job.json").write_text(json.dumps({"exit_code": 0, "cause": "earlier"}))
        (path / "worker-0.log").touch()
        assert store.result(EXPERIMENT, CELLS[0]).status == DONE
        store.begin(EXPERIMENT, CELLS[0])
        assert store.result(EXPERIMENT, CELLS[0]).status == PENDING
        assert "earlier" not in reason(2, path, "cells/x", None)
        assert {each.name for each in (path / f"previous-{number}").iterdir()} == {"job.json", "worker-0.log"}


def test_the_reason_of_a_failure(tmp_path):
    assert reason(-9, tmp_path, "cells/x", None) == "the launcher was ended by SIGKILL; logs: cells/x"
    assert reason(-40, tmp_path, "cells/x", None) == "the launcher was ended by signal 40; logs: cells/x"
    assert reason(2, tmp_path, "cells/x", None) == "the launcher exited with 2; log: cells/x/launcher.txt"
    (tmp_path / "launcher.txt").write_text("waiting\nany: no host h9\n\n")
    assert reason(2, tmp_path, "cells/x", None) == "any: no host h9; log: cells/x/launcher.txt"
    (tmp_path / "restart-1").mkdir()
    for name in ("worker-0.log", "restart-1/worker-0.log"):
        (tmp_path / "job.json").write_text(json.dumps({"cause": "worker 0 exited with 3", "cause_log": name}))
        (tmp_path / name).write_bytes(b"a" * 99_999 + f"\n in {name}\n\n".encode())
        assert reason(3, tmp_path, "cells/x", None) == f"worker 0 exited with 3; in {name}; log: cells/x/{name}"
    (tmp_path / "job.json").write_text(json.dumps({"cause": "lost", "cause_log": "../worker-0.log"}))
    assert reason(3, tmp_path, "cells/x", None) == "lost; log: cells/x/launcher.txt"
    assert reason(124, tmp_path, "cells/x", 5).startswith("it took longer than the time limit of 5 s")
    (tmp_path / "job.json").write_text(json.dumps({"cause": "\x1b]0;owned\x07\u202e\tü"}))
    assert reason(3, tmp_path, "cells/x", None).startswith("?]0;owned?? ü; ")  # the terminal obeys no program


@pytest.mark.parametrize("name", ["experiment.json", "table.md", "results.json"])
def test_files_of_others_are_not_replaced(tmp_path, name):
    (tmp_path / name).write_text("{}")
    with pytest.raises(UserError, match=f"no results of dmltrain-experiment, .*{tmp_path}/{name}"):
        Store(tmp_path).compare(EXPERIMENT, CELLS)


def test_names_that_the_terminal_cannot_show(tmp_path, monkeypatch):
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, "ascii"))
    (tmp_path / "x.py").touch()
    (tmp_path / "x.yaml").write_text("program: x.py\ngrid: {value: [\u202e]}\n", "utf-8")
    assert cli.main([str(tmp_path / "x.yaml"), "--dry-run"]) == 0
    sys.stdout.flush()
    assert b"--value '\\u202e'" in shown.getvalue()


def test_how_experiments_differ():
    def record(text: str) -> dict:
        made = parse(text.encode(), Path("x.yaml"))
        ids = [{"id": each.id} for each in cells(made, None).all]
        return json.loads(json.dumps({"experiment": made.resolved, "cells": ids}))

    before = record("program: t.py\noptions: {lr: 1, wd: 2}\nseeds: 0")
    assert of_records(before, record("program: t.py\noptions: {lr: 3, mom: 1}\nseeds: [0, 1]")) == (
        "options lr was 1, is 3; options mom was nothing, is 1; options wd was 2, is nothing; "
        "seeds was [0], is [0, 1]; 1 cells are new, 0 are gone, 1 have the same name"
    )
    assert of_records({"experiment": 3, "cells": [1]}, before).startswith("program was nothing, is t.py")


def test_forecasts():
    def result(cell: Cell, seconds: float) -> Result:
        return Result(cell.id, cell.settings, cell.options, DONE, Path(), seconds=seconds)

    done = forecast.from_done(CELLS[::4], [result(CELLS[0], 2.0), result(CELLS[4], 4.0)])  # seeds 0 and 1 of a row
    assert forecast.quick(CELLS[0], done) == 3.0 == forecast.quick(CELLS[1], done)
    answer = {"options": {"dataset": "mnist", "num_epochs": 2, "batch_size": 60, "num_examples": None}}
    estimated = forecast.estimate(CELLS[0], done, answer, lambda cell: pytest.fail("it is done"))
    assert (estimated.seconds, estimated.basis) == (3.0, "cells that are done")
    estimated = forecast.estimate(CELLS[1], done, answer, lambda cell: {"seconds_per_step": 0.01})
    assert (estimated.seconds, estimated.basis) == (24.0, "2000 steps of 0.01 s, measured here")
    sizes = {"num_epochs": 2, "batch_size": 60, "num_examples": 61}
    assert forecast.number_of_steps(CELLS[1], sizes) == 4, "the last step of an epoch has one sample"
    assert forecast.estimate(CELLS[1], done, {}, lambda cell: {"seconds_per_step": 0.01}).seconds is None
    assert forecast.estimate(CELLS[1], done, answer, lambda cell: "no torch").basis == "no torch"
    assert [duration(seconds) for seconds in (4.24, 200, 7500)] == ["4.2 s", "3 min 20 s", "2 h 5 min"]
    shown = text.forecast(["a"], [forecast.Estimate(60, "x")], 2)
    assert shown == ["cell  time       from", "a     1 min 0 s  x", "1 cells: about 30.0 s, 2 at once"]


def test_steps_are_measured_once_for_cells_whose_steps_are_the_same(tmp_path):
    program = tmp_path / "t.py"
    program.write_text("""import sys\nprint("once", file=open(__file__ + ".ran", "a"))
print('DMLTRAIN_MEASURE {"seconds_per_step": 0.5}') if sys.argv[1:] else sys.exit("why")\n""")
    said = {each.words: {"options": {"lr": index, "network": "mlp"}} for index, each in enumerate(CELLS)}
    measure = forecast.Measurer(Program(str(program)), said)
    assert measure(CELLS[0]) == {"seconds_per_step": 0.5} == measure(CELLS[1])
    assert (tmp_path / "t.py.ran").read_text() == "once\n"
    bare = replace(CELLS[0], options={})
    assert measure(bare) == f"{program} does not measure its steps"
    assert forecast.measure(str(program), bare) == "a step could not be measured: why"


@pytest.mark.parametrize(("code", "found"), [(0, 2), (1, None)])
def test_gpus_are_those_that_nvidia_smi_lists(tmp_path, monkeypatch, code, found):
    shell_script(tmp_path / "nvidia-smi", f"echo GPU 0: H200; echo; echo GPU 1: H200; exit {code}")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert check.count_gpus() == found


@pytest.mark.parametrize(
    ("source", "ours"),
    [
        *(("from dmltrain import fit", True), ("import dmltrain.fit", True), ("import dmltrain", False)),
        *(("def main():\n    from dmltrain.score import main", True), ("no python", False)),
        ("x = 'from dmltrain import fit'", False),
    ],
)
def test_whose_options_a_program_has(source, ours):
    assert uses_dmltrain(source) == ours
