"""Elastic jobs of real processes: what is refused, how they end, and what replays they are for. The losses that a job
survives: test_elastic_faults.py."""

import re
import shutil
import signal
from pathlib import Path

import pytest

from dmltrain import options
from dmltrain.audit.count import count
from dmltrain.audit.views_file import read
from dmltrain.base import env
from dmltrain.base.errors import UserError
from dmltrain.rounds import checks
from tests import image_records
from tests.elastic_job import (  # noqa: F401
    AUDIT,
    KILLED,
    PREFIX,
    STEPS,
    checkpoints,
    come,
    come_server,
    digests,
    each_sample_once,
    ends,
    make_forker,
    make_jobs,
    newest_server,
    replace_schedulers,
    replace_worker,
    start_scheduler,
    validation,
)
from tests.forked_job import forked
from tests.launch.conftest import launcher  # noqa: F401
from tests.waiting import wait_for

thorough = pytest.mark.thorough
LOST = "1:before:complete:4:kill"
INVITED = "0:before:train_step:{}:until/after/invite/{}"  # the leader goes on when it has heard of so many
OWN_STEPS = STEPS["dist_ssp"].split()
FILE = {"DMLTRAIN_SCHEDULER_FILE": "scheduler.json"}


STOPS = "--snapshot 3 --test-interval 2 --monitor 2 --max-iter 11"


def test_the_monitor_shows_the_arrays_of_workers_with_steps_of_their_own(jobs):
    job = jobs.start("", "--monitor", 2, "--kv-store", "dist_ssp", *AUDIT, workers=1)
    ends(job)
    shown = sorted({int(step) for step in re.findall(r"Batch: +(\d+)", job.output("worker-0"))})
    assert shown == list(range(2, shown[-1] + 1, 2)) and shown[-1] > 4


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ("on workers", STOPS),
        pytest.param("on servers", STOPS, marks=thorough),
        pytest.param("on workers", "--macrobatch-size 40 --snapshot 1 --swa-from 1", marks=thorough),
        pytest.param("on servers", "--macrobatch-size 40 --swa-from 1", marks=thorough),
        pytest.param("on workers", "--dtype float16", marks=thorough),
        # A plain job shows weights before their average.
        pytest.param("dist_local", STOPS.replace("--monitor 2 ", ""), marks=thorough),
        pytest.param("dist_local", "--macrobatch-size 40 --swa-from 1", marks=thorough),
    ],
)
def test_without_a_fault_it_is_bit_for_bit_the_plain_job(jobs, steps, words):
    words = [*PREFIX, *STEPS[steps].split(), *words.split()]
    few = {"workers": 3, "servers": 1}
    plain, elastic = jobs.start("", *words, elastic=None, **few), jobs.start("", *words, *AUDIT, **few)
    ends(elastic)
    plain.succeed()
    assert digests(plain, range(3)) == digests(elastic, range(3))
    assert validation(plain, 0) == validation(elastic, 2)
    assert checkpoints(plain) == checkpoints(elastic)
    lines = r"(?:Step\[\d+\] Validation|Batch: ).*"
    assert re.findall(lines, plain.output("worker-0")) == re.findall(lines, elastic.output("worker-0"))


@pytest.mark.parametrize("steps", ["on workers", *(pytest.param(each, marks=thorough) for each in [*STEPS][1:3])])
def test_a_signal_to_one_worker_makes_the_snapshot_of_a_plain_job_also_when_workers_are_lost_and_come(jobs, steps):
    words = [*PREFIX, *STEPS[steps].split()]
    signals = f"1:before:train_step:3:notice,2:before:train_step:5:kill,{INVITED.format(8, 1)}"
    job = jobs.start(signals, *words, "--snapshot-on-signal", 1e-6)
    replace_worker(job, 2, "2:before:train_step:1:notice")
    codes = job.wait()
    assert codes == dict.fromkeys(codes, 0) | {"worker-2": KILLED}, job.outputs()
    assert len(digests(job, (0, 1, 3))) == 1
    assert job.output("worker-0").count("A worker got SIGUSR1: all make a snapshot after iteration") == 2
    made = checkpoints(job)["m-0000_iter_3.pt"]
    if steps.startswith("on"):  # else no two runs have the same weights
        plain = jobs.start("", *words, "--max-iter", 3, elastic=None)
        plain.succeed()
        assert made == checkpoints(plain)["m-0000_iter_3.pt"]
    else:
        jobs.start("", *words, "--load-iteration", 3, "--model-prefix", job.folder / "m").succeed()


TWO_BITS = "--gc-type 2bit --host-sum off"


@pytest.mark.parametrize(
    ("fault", "least", "words"),
    [(LOST, 1, ""), *(pytest.param("", least, TWO_BITS, marks=thorough) for least in (None, 1))],
)
def test_whoever_goes_on_from_a_snapshot_uses_the_samples_that_are_left(jobs, fault, least, words):
    """A job that has lost a worker, and one that has not, elastic or plain."""
    words, few = words.split(), {"workers": 3, "servers": 1}
    first = jobs.start(fault, *PREFIX, *words, *(AUDIT if least else []), "--max-iter", 5, elastic=least, **few)
    if least:
        ends(first, **({"worker_1": KILLED} if fault else {}))
    else:
        first.succeed()
    found = set()
    for other in (1, None):
        folder = first.folder / str(other)
        folder.mkdir()
        shutil.copy(first.folder / "m-0000_iter_5.pt", folder)
        more = ["--model-prefix", folder / "m", "--load-iteration", 5, *(AUDIT if other else [])]
        job = jobs.start("", *words, *more, elastic=other, **few)
        job.succeed()
        found |= digests(job, range(3))
        if other:
            assert count(job.folder / "audit").problems == ("epoch 0: never committed: 60 position(s): 0-59",)
    if not fault:
        whole = jobs.start("", "--snapshot", 5, *PREFIX, *words, elastic=None, **few)
        whole.succeed()
        found |= digests(whole, range(3))
    assert len(found) == 1


@thorough
def test_broken_records_are_skipped_as_in_a_plain_job(jobs, tmp_path):
    file = image_records.write(tmp_path / "a.rec", range(40), lambda number, image: image * (number not in (5, 17)))
    words = f"--dataset imagenet --num-classes 4 --image-shape 3,16,16 --num-examples 40 --lr 0.005 --data-train {file}"
    words = [*words.split(), "--data-val", file, "--skip-broken", 4]  # two in training, two in validation
    plain, elastic = jobs.start("", *words, servers=1, elastic=None), jobs.start("", *words, *AUDIT, servers=1)
    plain.succeed()
    ends(elastic)
    assert digests(plain, range(4)) == digests(elastic, range(4))
    assert elastic.output("worker-0").count("All workers together skipped 4 records in this epoch") == 2
    fewer = jobs.start("1:before:complete:2:kill,2:before:barrier:2:kill", *words, *AUDIT, servers=1)
    ends(fewer, worker_1=KILLED, worker_2=KILLED)
    image_records.write(file, range(40), lambda number, image: image * bool(number % 3))
    too_many = jobs.start("", *words[:-1], 1, servers=1)
    codes = too_many.wait().values()
    assert 2 in codes and {*codes} <= {2, 75}, too_many.outputs()
    assert "--skip-broken 1 allows no more" in too_many.outputs()


# -- ends -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "least", "code", "said"),
    [
        (LOST, 2, KILLED, r"worker 1 on \S+ was lost: .*; 1 worker is left, and --min-workers is 2"),
        ("1:before:train_step:3:user", 1, 2, "a mistake of the user"),
        ("1:before:complete:4:server/0", 1, 75, "was lost: end of stream; no server is left"),
    ],
    ids=["too few are left", "a mistake of the user", "no server is left"],
)
def test_a_job_that_cannot_go_on_ends_and_says_why(jobs, fault, least, code, said):
    job = jobs.start(fault, workers=2, servers=1, elastic=least)
    codes = {"scheduler-0": 75, "server-0": KILLED if "server" in fault else 75, "worker-0": 75, "worker-1": code}
    assert job.wait() == codes, job.outputs()
    for name in (name for name in codes if codes[name] != KILLED):
        assert re.search(said, job.output(name)), job.outputs()
    assert "Traceback" not in job.outputs()


def ended(job, reason):
    """The job has ended with 75, and with one checkpoint, from which another goes on."""
    codes = job.wait()
    workers = [name for name in codes if name.startswith("worker") and codes[name] not in (0, KILLED)]
    others = [name for name in codes if not name.startswith("worker")]
    assert workers and {codes[name] for name in (*workers, *others)} == {75}, job.outputs()
    for name in (*workers, "scheduler-0"):
        assert re.search(reason, job.output(name)), job.outputs()
    assert "Traceback" not in job.outputs()
    (saved,) = (path for path in job.folder.glob("m-*") if path.suffix != ".part")
    return saved


HEARD = INVITED.format(6, 1)
NOTICES = {
    "steps of all": (f"1:after:pushpull:7:leave,{HEARD}", []),
    # Worker 1 has made local steps of an average then, and makes no more: nobody may wait for it.
    "local steps": (
        "1:before:train_step:3:leave,1:before:train_step:4:until/after/announce/2,0:before:train_step:3:until/after/invite/1",
        STEPS["dist_local"].split(),
    ),
    "own steps": (f"1:after:push:6:leave,1:before:push:7:until/after/announce/2,{INVITED.format(3, 1)}", OWN_STEPS),
}


@pytest.mark.parametrize(
    "faults, words", [pytest.param(*each, marks=[thorough] * bool(each[1]), id=name) for name, each in NOTICES.items()]
)
def test_a_notice_below_the_minimum_ends_the_job_with_a_checkpoint(jobs, faults, words):
    job = jobs.start(faults, *PREFIX, *AUDIT, *words, workers=2, servers=1, elastic=2)
    said = "the job ends: worker 1 leaves on purpose: SIGTERM; 1 worker is left, and --min-workers is 2"
    saved = ended(job, said)
    assert all("never committed" in problem for problem in count(job.folder / "audit").problems)
    found = set()
    for least in (None, 1):
        folder = job.folder / f"elastic {least}"
        folder.mkdir()
        shutil.copy(saved, folder)
        more = ["--model-prefix", folder / "m", "--load-epoch", "last", *words]
        other = jobs.start("", *more, workers=2, servers=1, elastic=least)
        other.succeed()
        steps = r" and \d+ steps of the next"
        if "dist_local" in words:  # worker 1 may leave before the first average: then the checkpoint has no steps
            steps = f"({steps})?"
        assert re.search(f"Loaded checkpoint of epoch 0{steps}", other.output("worker-0"))
        found |= digests(other, (0, 1))
    assert words == OWN_STEPS or len(found) == 1, "an elastic job goes on from it as a plain one does"


@thorough
def test_a_job_that_has_waited_in_vain_ends_with_a_checkpoint(jobs):
    environment = {"DMLTRAIN_WAIT_FOR_HOSTS": "1", "DMLTRAIN_MAX_WORKERS": "4"}
    job = jobs.start("1:after:pushpull:7:kill", *PREFIX, workers=2, servers=1, elastic=2, env=environment)
    few = "the job ends: 1 worker is left, and --min-workers is 2"
    ended(job, rf"{few}: no more have come within \d+ s \(--wait-for-hosts\)")


@thorough
def test_a_replacement_of_a_server_that_waits_at_the_end_ends_with_the_job(jobs):
    end = "0:before:close:1:until/after/newcomer/1"
    job = jobs.start(end, *AUDIT, workers=2, env={"DMLTRAIN_RESTART_SERVERS": "1"})
    job.wait_for_line("worker-0", "View 1 after op 0")
    job.processes["server-1"].kill()
    job.processes["server-1"].wait()
    job.wait_for_line("worker-0", "Final weights")
    come_server(job, 1)
    codes = job.wait()
    assert codes == dict.fromkeys(codes, 0) | {"server-1": KILLED}, job.outputs()
    assert newest_server(job, 1) == "server-1-2"
    assert [view.servers for view in read(job.folder / "audit/views.json").views] == [(0, 1), (0,)]


# -- what is refused --------------------------------------------------------------------------------------------------

NOT_WITH = "--elastic does not work with {}: "
NEEDS = "needs --kv-store dist_sync, dist_async, dist_ssp or dist_local (this is {})"
OF_ALL = "needs --kv-store dist_sync: with dist_ssp each worker makes steps of its own"
WHOLE = (
    "--factors auto",
    "--data-parts local",
    "--test-io 1",
    "--server-shares links",
    "--sync-bn 1",
)  # other values are allowed
BY_TIME = "--snapshot-on-signal 5 --model-prefix m"
REFUSED = {
    **{words: NOT_WITH.format(words) for words in WHOLE},
    "--show-schedule": NOT_WITH.format("--show-schedule"),
    f"{BY_TIME} --audit there": NOT_WITH.format("--snapshot-on-signal and --audit or --replay"),
    "--kv-store dist_local --balance": f"--balance {OF_ALL.replace('ssp', 'local')}",
    "--kv-store local": NEEDS.format("local"),
    "--server-snapshot 5": "--server-snapshot needs --update-on-kvstore 1",
    "--backend mxnet": "--backend mxnet cannot do this, because ps-lite ends",
    "--kv-store dist_ssp --replay there": f"--replay {OF_ALL.replace('dist_sync', 'dist_sync or dist_local')}",
    "--kv-store dist_ssp --balance": f"--balance {OF_ALL}",
    "--kv-store dist_ssp --batch per-worker": f"--batch per-worker {OF_ALL}",
}
RULES = {"DMLTRAIN_STRAGGLERS": "1"}
NO_RULE = "--rule needs the optimizer on the servers: dist_async, dist_ssp, or"
OF_MXNET = "--rule: ps-lite, of --backend mxnet, cannot change its kvstore"
PLAIN = {"--audit": "there", "--replay": "there", "--balance": "", "--batch per-worker": "", "--server-snapshot": "0"}
MOST = [
    *((words, 1, {}, said) for words, said in REFUSED.items()),
    *((f"{name} {value}", 0, {}, f"{name} needs a job that was started with") for name, value in PLAIN.items()),
    ("", 1, {"DMLTRAIN_SERVER_SHARES": "links"}, NOT_WITH.format("--server-shares links")),
    ("", 1, RULES, NO_RULE),
    ("", 0, RULES, NO_RULE),
    ("--backend mxnet", 0, RULES, OF_MXNET),
    ("--sync-bn 1", 0, RULES, "--rule: --sync-bn needs steps of all workers together"),
]


def problems(words, least, environment):
    shape = {"DMLC_ROLE": "worker", "DMLC_NUM_WORKER": "1", "DMLC_NUM_SERVER": "1", "DMLC_WORKER_ID": "0"}
    shape |= {"DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": "9000"}
    found = env.read({**shape, **({"DMLTRAIN_ELASTIC": str(least)} if least else {}), **environment})
    line = ["--network", "mlp", "--dataset", "digits", "--kv-store", "dist_sync", *words.split()]
    checks.check(options.parse(line, "elastic"), found)


@pytest.mark.parametrize(("words", "least", "environment", "said"), MOST)
def test_what_an_elastic_or_a_plain_job_cannot_do_is_refused(words, least, environment, said):
    with pytest.raises(UserError) as caught:
        problems(words, least, environment)
    assert said in str(caught.value)


def test_what_an_elastic_job_can_do_is_not_refused():
    problems(f"--kv-store dist_ssp --server-snapshot 5 --staleness 1 --batch-size 16 {BY_TIME}", 1, {})


def refused(job, text, codes=(2,)):
    found = job.wait()
    assert set(found.values()) == set(codes), job.outputs()
    for name in found:
        assert text in job.output(name), job.outputs()
    assert "Traceback" not in job.outputs()


@pytest.mark.parametrize(
    ("words", "program", "said"),
    [
        ("--factors auto --test-io 1", "elastic.py", f"leave one of them out; {NOT_WITH.format('--factors auto')}"),
        (".", "phases.py", "error: kvstore.create: this job was started with --elastic, which programs that use the"),
    ],
    ids=["several problems at once", "a program of one's own"],
)
def test_each_process_names(jobs, words, program, said):
    refused(jobs.start("", *words.split(), program=program, workers=1, servers=1), said)


def test_a_rank_beyond_the_limit_is_refused(jobs):
    job = jobs.start(INVITED.format(3, 1), workers=2, servers=1, env={"DMLTRAIN_MAX_WORKERS": "3"})
    come(job, 3)
    assert job.processes["worker-3"].wait(60.0) == 2
    assert "DMLC_WORKER_ID=3: this job has 3 workers, expected 0 to 2" in job.output("worker-3")
    come(job, 2)
    codes = job.wait()
    assert {name for name, code in codes.items() if code} == {"worker-3"}, job.outputs()


@thorough
def test_one_with_another_learning_rate_is_refused(jobs):
    """A newcomer, and the replacement of a lost worker."""
    job = jobs.start(f"{LOST},{INVITED.format(6, 2)}", *AUDIT, workers=2, servers=1, env={"DMLTRAIN_MAX_WORKERS": "4"})
    come(job, 2, "--lr", "0.5")
    replace_worker(job, 1, "", "--lr", "0.5")
    for name, worker in (("worker-2", 2), ("worker-1-2", 1)):
        assert job.processes[name].wait(120.0) == 75, job.outputs()
        said = rf"did not join the job: worker {worker} on .* is not like the .* other workers: lr 0.5 \(the job: 0.1"
        assert re.search(said, job.output(name)), job.outputs()
    replace_worker(job, 1, "")
    come(job, 3)
    ends(job, worker_1=KILLED, worker_2=75, worker_1_2=75)


# -- replays ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recording():
    """The text of views.json of a job that has run, or nothing yet."""
    return []


@pytest.fixture
def recorded(jobs, recording, tmp_path):
    """The views.json of a job of 3 workers that has lost one."""
    if not recording:
        job = jobs.start(LOST, *AUDIT, workers=3, servers=1)
        job.wait()
        recording.append((job.folder / "audit/views.json").read_text())
    file = tmp_path / "views.json"
    file.write_text(recording[0])
    return file


def test_a_replay_of_another_job_lists_what_differs(jobs, recorded):
    job = jobs.start("", "--replay", recorded, "--mom", 0.5, "--batch-size", 6, workers=2, servers=1)
    differs = "it is of a job with 3 worker(s) and no --mom, this one has 2 worker(s) and --mom 0.5"
    refused(job, f"--replay {recorded}: {differs}: start this job with -n 3 and no --mom", codes=(2, 75))


def test_a_replay_that_loses_a_worker_ends(jobs, recorded):
    job = jobs.start("2:before:complete:6:kill", "--replay", recorded, workers=3, servers=1)
    codes = job.wait()
    assert codes.pop("worker-2") == KILLED, job.outputs()
    assert codes.pop("worker-1") in (0, 75) and set(codes.values()) == {75}, job.outputs()
    assert "a replay needs all workers of the replayed job: start it again" in job.output("worker-0")


@thorough
def test_a_replay_ends_with_its_scheduler(jobs, recorded):
    job = jobs.start("2:before:complete:9:scheduler", "--replay", recorded, env=FILE, workers=3)
    replace_schedulers(job, 1)
    codes = job.wait()
    assert codes["scheduler-0-2"] == codes["worker-0"] == codes["worker-2"] == 75, job.outputs()
    assert "a replay cannot go on when its scheduler is lost: start it again" in job.output("worker-0")


@thorough
def test_a_replay_can_be_replayed_with_another_number_of_servers(jobs, recorded):
    first = jobs.start("", "--replay", recorded, *AUDIT, workers=3, servers=1)
    ends(first)
    second = jobs.start("", "--replay", first.folder / "audit/views.json", workers=3, servers=2)
    second.succeed()
    assert len(digests(first, (0, 2)) | digests(second, (0, 2))) == 1
    assert "This worker's part has ended: the replay has no later view with this worker" in second.output("worker-1")


@thorough
def test_a_replay_without_room_for_who_joined_says_what_to_do(jobs):
    job = jobs.start(INVITED.format(3, 1), *AUDIT, workers=1, servers=1, env={"DMLTRAIN_MAX_WORKERS": "2"})
    come(job, 1)
    job.succeed()
    replay = jobs.start("", "--replay", job.folder / "audit/views.json", workers=1, servers=1)
    assert set(replay.wait().values()) == {2, 75}
    said = r"worker 1 joined the recorded job, .* no more than 1 worker\(s\): .* DMLTRAIN_MAX_WORKERS=2"
    assert re.search(said, replay.output("worker-0")), replay.outputs()


# -- schedulers that are not killed at a moment of a worker ----------------------------------------------------------


@thorough
def test_one_that_was_only_stopped_gives_way(jobs):
    """It decides nothing when it goes on: the job has another one, and is still there."""
    job = jobs.start("1:before:complete:4:stop,2:before:complete:8:go on once gone", *AUDIT, env=FILE)
    old = job.processes["scheduler-0"]
    stat = Path(f"/proc/{job.processes['worker-1'].pid}/stat")
    wait_for(lambda: ") T " in stat.read_text(), job.outputs)
    old.send_signal(signal.SIGSTOP)
    start_scheduler(job, 2)
    job.wait_for_line("scheduler-0-2", "goes on after view 1")
    job.processes["worker-1"].send_signal(signal.SIGCONT)
    old.send_signal(signal.SIGCONT)
    assert old.wait(60.0) == 75, job.outputs()
    assert "incarnation 2 of the scheduler has taken over" in job.output("scheduler-0")
    assert job.processes["worker-1"].wait(60.0) == 75, job.outputs()  # the job has removed it
    (job.folder / "passed-gone").touch()
    ends(job, scheduler_0=75, worker_1=75)


@thorough
def test_a_job_that_waits_for_hosts_goes_on_waiting_with_the_next_scheduler(jobs):
    environment = {**FILE, "DMLTRAIN_WAIT_FOR_HOSTS": "60", "DMLTRAIN_MAX_WORKERS": "3"}
    job = jobs.start("1:after:pushpull:7:leave", *AUDIT, env=environment, workers=2, servers=1, elastic=2)
    job.wait_for_line("scheduler-0", "view 2 after op")  # in which worker 0 waits
    job.processes["scheduler-0"].kill()
    start_scheduler(job, 2)
    job.wait_for_line("scheduler-0-2", "view 3 after op")
    come(job, 2)
    ends(job, scheduler_0=KILLED)
    views = read(job.folder / "audit/views.json").views
    assert [view.members for view in views] == [(0, 1), (0,), (0,), (0, 2)]
    assert len({view.base for view in views[1:]}) == 1, "worker 0 has trained alone"


# -- with the launcher ------------------------------------------------------------------------------------------------


@thorough
def test_the_launcher_replaces_a_worker_and_the_only_server_of_a_real_training(launcher, tmp_path):  # noqa: F811
    options = ("-n", 3, "-s", 1, "--elastic", "--restart-servers", 1, "--restart-workers", 1)
    words = ("--kv-store", "dist_sync", "--batch-size", 16, "--emulate-step", 0.1, "--audit", tmp_path / "audit")
    program = Path(__file__).parent / "programs/two_die_once.py"
    done = launcher.start(*options, *forked(program, *words), env={"PID": str(tmp_path / "pid")}).wait(250)
    assert done.code == 0, done
    logs = [launcher.log(f"worker-{rank}").decode() for rank in range(3)]
    for name in ("worker 1", "server 0"):
        assert f"starting the replacement of {name} on" in str(done)
        assert f"Removed from the job: {name} on" in logs[0]
        assert re.search(rf"New in view \d: .*{name.replace(' ', 's ')}\b", logs[0])
    assert len({re.search(r"Final weights sha256=(\w+)", text)[1] for text in logs}) == 1
    assert read(tmp_path / "audit/views.json").views[-1].servers == (0,)
    found = count(tmp_path / "audit")
    assert found.problems == () and all((times == 1).all() for times in found.times.values())
