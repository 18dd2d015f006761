"""A script of one's own in elastic jobs of real processes: dmltrain.State and dmltrain.loader."""

import re

import pytest

from dmltrain.audit.views_file import read
from tests.elastic_job import KILLED, ends, make_forker, make_jobs, start_like  # noqa: F401

thorough = pytest.mark.thorough
WORDS = ("--epochs", "2")
SECONDS = 300.0  # for a job, on a busy machine


@pytest.fixture
def start(jobs):
    """`faults`: see programs/elastic_script.py."""

    def started(faults="", *words, elastic=1, replay=None, workers=3, servers=2, **more):
        env = {} if elastic is None else {"DMLTRAIN_REPLAY": str(replay)} if replay else {"DMLTRAIN_AUDIT": "audit"}
        job = {"workers": workers, "servers": servers, "elastic": elastic, "env": env | more}
        return jobs.start(faults, *WORDS, *words, program="elastic_script.py", **job)

    return started


def lines(job, worker):
    """What the script has printed, without the log."""
    return [line for line in job.output(f"worker-{worker}").splitlines() if line.startswith(("Epoch", "Final"))]


def same(job, workers):
    """These workers have printed the same, to the end. Returns it."""
    found = {tuple(lines(job, worker)) for worker in workers}
    assert len(found) == 1, job.outputs()
    (printed,) = found
    assert printed[-1].startswith("Final weights sha256="), job.outputs()
    return printed


def survived(job, workers, **codes):
    """These workers have printed the same, to the end. Returns it."""
    ends(job, SECONDS, **codes)
    return same(job, workers)


def test_a_worker_is_lost_in_the_middle_of_an_epoch(start):
    job = start("1:in:5")
    survived(job, (0, 2), worker_1=KILLED)
    assert [view.members for view in read(job.folder / "audit/views.json").views] == [(0, 1, 2), (0, 2)]
    assert "View 2 after op 4: workers 0, 2; " in job.output("worker-0")


@thorough
def test_without_a_fault_it_is_the_plain_job_bit_for_bit(start):
    plain, elastic = (start(elastic=each, workers=2) for each in (None, 1))
    plain.succeed(SECONDS)
    assert same(plain, range(2)) == survived(elastic, range(2))


# Ops of 3 workers: 1 to 15 rounds of 96 samples, the last one of less; 16 statistics, 17 validation; 18 to 34 the same.
MOMENTS = {
    "the leader, when statistics are merged": ("0:before:16", 3),
    "all but one": ("0:in:3,1:after:9,2:before:16", 4),
}


@thorough
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_worker_is_lost(start, moment):
    faults, workers = MOMENTS[moment]
    job = start(faults, workers=workers)
    lost = [int(word[0]) for word in faults.split(",")]
    left = [each for each in range(workers) if each not in lost]
    printed = survived(job, left, **{f"worker_{each}": KILLED for each in lost})
    said = job.output(f"worker-{left[0]}")
    assert all(f"Batch-norm statistics of worker {each} since the last merge" in said for each in lost)
    replay = start(replay=job.folder / "audit/views.json", workers=workers, servers=1)
    replay.succeed(SECONDS)
    assert same(replay, left)[-1] == printed[-1]
    assert all("this worker's part has ended: view " in replay.output(f"worker-{each}") for each in lost)


def replace(job, member, leader):
    """Start a replacement when the worker has ended and the leader waits for it."""
    job.processes[f"worker-{member}"].wait(60)
    job.wait_for_line(f"worker-{leader}", "This worker waits for one that comes")
    start_like(job, "new", f"worker-{member}", DMLTRAIN_JOIN="1")


ON_SERVERS = {"MXNET_UPDATE_ON_KVSTORE": "1"}


@thorough
@pytest.mark.parametrize("faults, saves", [("1:after:3", False), ("0:saves:5,1:agreed:5", True)])
def test_a_worker_is_lost_with_the_optimizer_on_the_servers(start, faults, saves):
    """Also of a round in which a checkpoint is saved: before the first push, when all have said how many samples they
    have."""
    job = start(faults, **ON_SERVERS)
    printed = survived(job, (0, 2), worker_1=KILLED)
    assert (job.folder / "saved.pt").exists() == saves
    assert not saves or (job.folder / "saved.pt").stat().st_size
    replay = start(replay=job.folder / "audit/views.json", servers=1, **ON_SERVERS)
    replay.succeed(SECONDS)
    assert same(replay, (0, 2))[-1] == printed[-1]


@thorough
@pytest.mark.parametrize(
    "moment, lost", [("reads:4", "after:4"), ("reads-in:5", "after:4"), ("saves-after:15", "after:15")]
)
def test_a_worker_that_reads_the_optimizers_state_alone_when_the_members_change_is_told_how(start, moment, lost):
    job = start(f"0:{moment},1:{lost}", **ON_SERVERS)
    survived(job, (2,), worker_0=1, worker_1=KILLED)
    assert "use state.save(path) after the loop over the loader" in job.output("worker-0"), job.outputs()


@thorough
@pytest.mark.parametrize(
    "seconds, lost", [(0, set()), (1000, {"4 steps older than the weights: it is a lost server's last snapshot"})]
)
def test_servers_state_is_copied_as_often_as_the_script_says(start, seconds, lost):
    """The first copy is made after the first step; server 0, which has the weights, is lost after the fifth."""
    copies = ",".join(f"{member}:copies:{seconds}" for member in range(2))
    job = start(f"{copies},0:copied-0:5", workers=2)
    survived(job, range(2), server_0=KILLED)
    assert set(re.findall(r"the optimizer's state of .*\) is (.*)", job.outputs())) == lost, job.outputs()


@thorough
@pytest.mark.parametrize("lost, leader, joins", [(0, 1, 9), (1, 0, 19)])
def test_a_replacement_gets_the_state_and_goes_on_with_the_others(start, lost, leader, joins):
    """In the middle of an epoch; with the first round of one (the one before has a round more)."""
    job = start(f"{lost}:in:5,{leader}:invited:{joins}")
    replace(job, lost, leader)
    printed = survived(job, {0, 1, 2} - {lost}, **{f"worker_{lost}": KILLED})
    new = [line for line in job.output("new").splitlines() if line.startswith(("Epoch", "Final"))]
    assert new and new == list(printed[-len(new) :]), job.outputs()
    views = read(job.folder / "audit/views.json").views
    assert [view.joined for view in views] == [(), (), (lost,)] and views[-1].base == joins - 1


@thorough
def test_a_checkpoint_is_written_by_the_next_worker_and_resumed_by_any_number(start, tmp_path):
    """The leader is lost when it has written that of the first epoch, before the others know."""
    words = ("--checkpoint", tmp_path / "it.pt")
    printed = survived(start("0:before:18", *words), (1, 2), worker_0=KILLED)
    again = start("", *words, "--epochs", 3, workers=2, servers=1, elastic=None)
    again.succeed(SECONDS)
    resumed = same(again, (0, 1))
    assert [each.split()[0] for each in resumed[:-1]] == ["Epoch[2]"]
    assert float(resumed[0].split("best=")[1]) >= float(printed[-2].split("best=")[1])


@thorough
def test_an_error_of_one_worker_ends_only_that_one_and_a_mistake_of_the_user_the_job(start):
    survived(start("1:own:5", servers=1), (0, 2), worker_1=1)
    job = start("1:user:5", workers=2, servers=1)
    codes = job.wait(SECONDS)
    assert codes["worker-1"] == 2 and codes["worker-0"] == 75, job.outputs()
    assert "a mistake of this worker" in job.output("worker-0")


@thorough
def test_sigterm_is_a_notice_to_leave(start):
    job = start("1:notice:5,0:invited:6", servers=1)
    survived(job, (0, 2))
    views = read(job.folder / "audit/views.json").views
    assert [(view.members, view.lost) for view in views] == [((0, 1, 2), ()), ((0, 2), ())]
    assert "this worker's part has ended: view 2 is without worker 1" in job.output("worker-1")


@thorough
def test_a_slow_worker_gets_fewer_samples(start):
    options = ("--epochs", "1", "--balance")
    job = start("0:slow:4,1:slow:16", *options, workers=2, servers=1)
    printed = survived(job, (0, 1))
    file = job.folder / "audit/views.json"
    parts = [view.shares for view in read(file).views if view.shares]
    assert parts and parts[0][1] < parts[0][0] and sum(parts[0]) == 64, job.outputs()
    again = start("", *options[:2], workers=2, servers=1, replay=file)
    again.succeed(SECONDS)
    assert printed == same(again, (0, 1))


@thorough
def test_a_worker_is_lost_between_averages_and_replaced(start):
    """15 steps in an epoch, 4 averages; the others make the last but one without it."""
    averages = ",".join(f"{member}:averages:4" for member in range(3))
    job = start(f"1:in:3,{averages}")
    printed = survived(job, (0, 2), worker_1=KILLED)
    replay = start(averages, replay=job.folder / "audit/views.json", servers=1)
    replay.succeed(SECONDS)
    assert same(replay, (0, 2)) == printed
    job = start(f"1:in:3,0:invited:5,{averages}")
    replace(job, 1, 0)
    printed = survived(job, (0, 2), worker_1=KILLED)
    new = [line for line in job.output("new").splitlines() if line.startswith(("Epoch", "Final"))]
    assert new == list(printed[-len(new) :]), job.outputs()
    assert [view.joined for view in read(job.folder / "audit/views.json").views] == [(), (), (1,)]


@pytest.mark.parametrize("kvstore", ["dist_ssp", pytest.param("dist_async", marks=thorough)])
def test_a_worker_that_makes_steps_of_its_own_is_lost(start, kvstore):
    faults = ",".join([*(f"{member}:kvstore:{kvstore}" for member in range(3)), "1:alone:5"])
    job = start(faults)
    survived(job, (0, 2), worker_1=KILLED)
    assert read(job.folder / "audit/views.json").views[-1].members == (0, 2)
