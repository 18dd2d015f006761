"""`--check` with a program: its step is measured as its workers would run, and a forecast made of it."""

import json
import os
import re
import signal

import pytest

from dmltrain_launch.forecast.measure import supports_measuring
from dmltrain_launch.job.job import Job, Setting
from tests.forked_job import forked
from tests.launch.conftest import ROOT, carriers, wait_for

MEASURES = """
import json, os, sys, time
NAMES = "DMLTRAIN_MEASURE", "DMLC_NUM_SERVER", "DMLTRAIN_ELASTIC", "OMP_NUM_THREADS"
path = f"ran-{os.getpid()}.json"  # of each process
with open(path, "w") as file:
    json.dump({name: os.environ.get(name) for name in NAMES}, file)
seconds = 0.15
if os.environ["DMLC_NUM_WORKER"] == "1":
    disturbed = "stays" in sys.argv or "passes" in sys.argv and not os.path.exists("before")
    open("before", "w").close()
    seconds = 3.0 if disturbed else 0.1
said = {"seconds_per_step": seconds, "samples_per_step": 64, "model_bytes": 4e6, "network": "n"}
print("some other line", flush=True)
print("DMLTRAIN_MEASURE", json.dumps(said))
"""
CORES = len(os.sched_getaffinity(0))


def check(launcher, *arguments: object, code: int = 0) -> str:
    result = launcher.run("--check", *arguments)
    assert result.code == code, result
    return result.out.decode()


def ran(launcher) -> list[dict]:
    return [json.loads(path.read_text()) for path in launcher.folder.glob("ran-*.json")]


def rows(text: str) -> list[list[str]]:
    """Those of the tables of the forecast."""
    return [re.split(r" *\| *", line)[1:-1] for line in text.splitlines() if re.match(r"\| +\d+ \| +\d+ \| ", line)]


def test_workers_measure_together_and_then_one_alone(launcher):
    elastic = "--elastic", "--min-workers", 2
    text = check(launcher, "-n", 2, "-s", 1, *elastic, launcher.script(MEASURES), "an argument")
    seen = sorted(ran(launcher), key=lambda each: int(each["OMP_NUM_THREADS"]))
    assert [each["OMP_NUM_THREADS"] for each in seen] == [str(max(1, CORES // 2))] * 2 + [str(CORES)]
    assert {(each["DMLTRAIN_MEASURE"], each["DMLC_NUM_SERVER"]) for each in seen} == {("5", "0")}
    assert {each["DMLTRAIN_ELASTIC"] for each in seen} == {None}, "each measures alone"
    alone, together = "1 0 100 0 100 640 1.0 100 %", "2 1 150 0 150 853 1.3 67 %"
    assert [" ".join(row) for row in rows(text)[-2:]] == [alone, together], text
    assert "Distributing pays: 2 workers are 1.3 times" in text
    assert "All traffic stays on one host" in text
    assert not (launcher.folder / "logs").exists()


@pytest.mark.parametrize(
    ("disturbance", "times", "row", "words"),
    [
        ("passes", 2, "2 2 150 0 150 853 1.3 67 %", "Distributing pays"),
        ("stays", 3, "2 2 150 0 150 853 2.0 100 %", "Not reliable: a worker alone on localhost"),
    ],
)
def test_implausible_results_are_measured_again(launcher, disturbance, times, row, words):
    text = check(launcher, "-n", 2, launcher.script(MEASURES), disturbance)
    assert len(ran(launcher)) == 2 + times
    assert " ".join(rows(text)[-1]) == row and words in text, text
    assert ("Not reliable" in text) == (disturbance == "stays")


def test_a_program_without_measuring_is_not_started(launcher):
    text = check(launcher, "-n", 2, "touch", "it ran")
    assert "No forecast: " in text and "was not started" in text, text
    check(launcher, "--elastic", "--min-workers", 2)  # hosts can be checked for an elastic job of any size
    assert not (launcher.folder / "it ran").exists()


@pytest.mark.parametrize(
    ("options", "why"), [("-n 1 -s 0", "without servers (-s 0)"), ("", "give the number of workers with -n")]
)
def test_why_there_is_no_forecast(launcher, options, why):
    assert why in check(launcher, *options.split(), launcher.script(MEASURES))
    assert ran(launcher) == []


def test_a_program_that_ignores_the_request_to_measure_is_reported(launcher):
    text = check(launcher, "-n", 1, "--env", "DMLTRAIN_MEASURE=3", "sh", "-c", "touch ran; echo $DMLTRAIN_MEASURE")
    assert "No forecast: the program reported no step" in text and (launcher.folder / "ran").exists()


def test_a_program_that_fails_is_quoted(launcher):
    script = launcher.script("import os, sys; sys.exit('no such GPU ' + os.environ['WORD'])  # DMLTRAIN_MEASURE")
    result = launcher.run("--check", "-n", 1, "--secret", "WORD", script, env={"WORD": "hush-hush-7"})
    text = result.out.decode()
    assert "No forecast: the program reported no step (worker 0" in text and "exited with code 1: no such GPU " in text
    assert "hush-hush-7" not in text + result.err


def test_an_impatient_user_leaves_nothing_behind(launcher):
    script = launcher.script("import time; open('ready', 'w'); time.sleep(100)  # DMLTRAIN_MEASURE")
    launched = launcher.start("--check", "-n", 2, script)
    wait_for((launcher.folder / "ready").exists, "a process that measures")
    launched.signal(signal.SIGINT)
    result = launched.wait()
    assert result.code == 130, result
    assert "No forecast" in result.out.decode() and "the launcher got SIGINT" in result.out.decode(), result
    wait_for(lambda: not carriers(f"TMPDIR={launcher.folder / 'tmp'}"), "the end of all processes")


@pytest.mark.thorough
def test_a_training_program_of_dmltrain(launcher):
    program = forked(ROOT / "examples/train_digits.py", "--network", "mlp", "--kv-store", "dist_sync")
    text = check(launcher, "-n", "2", "-s", "2", "--env", "DMLTRAIN_MEASURE=0.3", *program)
    assert "Forecast for dist_sync: mlp, batch 32 per worker, --gc-type none" in text, text
    assert "This forecast gives bounds" in text


HEED = ["from dmltrain import fit\n", "from dmltrain import a, fit as b\n", "import dmltrain.fit\n"]
HEED += ["from dmltrain.fit import main\n", "# heeds DMLTRAIN_MEASURE\n"]
OTHERS = ["import dmltrain\n", "from other import fit\n", "fit = 'dmltrain'\n", "def broken(:\n", ""]


@pytest.mark.parametrize("source", [*HEED, *OTHERS])
def test_which_programs_measure_themselves(tmp_path, source):
    path = tmp_path / "program.py"
    path.write_text(source)
    for argv in ((str(path),), ("python", "-u", str(path), "x.py")):
        assert supports_measuring(Job("j", "m", argv, 1, 1, "/")) is (source in HEED)


def test_other_programs_measure_if_the_variable_is_set():
    assert not supports_measuring(Job("j", "m", ("python", "gone.py"), 1, 1, "/"))
    assert supports_measuring(Job("j", "m", ("binary",), 1, 1, "/", settings=(Setting("DMLTRAIN_MEASURE", "5"),)))
