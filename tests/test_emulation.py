"""Emulated computing: which steps are slow, how long they take, and that nothing else changes."""

import dataclasses
import math
import re
from datetime import datetime

import pytest

from dmltrain import fit
from dmltrain.options import Options, parse
from dmltrain.train import emulation
from dmltrain.train.emulation import Slowness, SlowPace
from tests.benchmarks.as_a_user import benchmark_module
from tests.test_fit import backend, finished, run, train  # noqa: F401  (fixtures)

pytestmark = pytest.mark.filterwarnings("ignore:Please import `csr_matrix`:DeprecationWarning")  # MXNet's own
FIVE_PERCENT = Options(emulate_step=0.1, stragglers=(0.05, 10.0))


def drawn(rank: int, seed: int = 0, steps: int = 10_000, probability: float = 0.05) -> list[bool]:
    slow = Slowness(0.0, probability, 10.0, 1.0, seed, rank)
    return [slow.straggles(step) for step in range(steps)]


# -- the draws --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("probability", [0.0, 0.05, 0.5, 1.0])
def test_so_many_of_ten_thousand_steps_are_drawn_as_the_probability_says(probability):
    expected, deviation = 10_000 * probability, math.sqrt(10_000 * probability * (1 - probability))
    assert abs(sum(drawn(3, probability=probability)) - expected) <= 4 * deviation


def test_workers_and_seeds_have_draws_of_their_own_that_are_the_same_in_every_version():
    """Of two independent workers 1 in 400 steps is drawn for both. Published figures depend on the draws."""
    first = drawn(0)
    for other in (drawn(1), drawn(0, seed=1)):
        assert 5 <= sum(a and b for a, b in zip(first, other, strict=True)) <= 60
    assert [step for step, slow in enumerate(drawn(0, steps=100)) if slow] == [2, 29, 72]
    assert [step for step, slow in enumerate(drawn(4, seed=7, steps=100)) if slow] == [55, 70, 75, 76, 84, 99]


# -- one step ---------------------------------------------------------------------------------------------------------


class Thread:
    """A training thread: its clock, and how long it has waited for the kvstore."""

    def __init__(self, **slow: float) -> None:
        self.now, self.waited, self.slept = 100.0, 0.0, 0.0
        values = {"seconds": 0.0, "probability": 0.0, "factor": 1.0, "always": 1.0, "seed": 0, "rank": 0, **slow}
        self.pace = SlowPace(Slowness(**values), lambda: self.waited, lambda: self.now, self.sleep)

    def sleep(self, seconds: float) -> None:
        self.slept += seconds
        self.now += seconds

    def wait(self, seconds: float) -> None:
        self.waited += seconds
        self.now += seconds

    def step(self, number: int, forward: float, backward: float, wait: float = 0.0, batches=1, samples=0) -> float:
        """The seconds that the step has taken, without waits."""
        began, waited = self.now, self.waited
        self.pace.step(number, batches, samples)
        for _ in range(batches):
            self.pace.begin()
            self.wait(wait)
            self.now += forward
            self.pace.between()
            self.now += backward
            self.pace.end()
        return self.now - began - (self.waited - waited)


@pytest.mark.parametrize(
    ("slow", "steps", "expected"),
    [
        # the first backward pass is not known before, and of the others the shortest is expected
        ({"seconds": 0.5}, [(0.1, 0.2), (0.1, 0.2), (0.2, 0.2), (0.1, 0.3)], [0.7, 0.5, 0.5, 0.6]),
        ({"seconds": 0.25}, [(0.1, 0.2)] * 3, [0.45, 0.3, 0.3]),
        ({"seconds": 0.5}, [(0.1, 0.2, 3.0)] * 3, [0.7, 0.5, 0.5]),
        ({"seconds": 0.0, "always": 3.0}, [(0.1, 0.2)] * 2, [0.5, 0.9]),
        ({"seconds": 0.5, "always": 3.0}, [(0.1, 0.2)] * 2, [1.7, 1.5]),
    ],
    ids=["as long as asked", "longer by itself", "waits do not count", "a factor", "a factor of the longer of both"],
)
def test_how_long_steps_take(slow, steps, expected):
    thread = Thread(**slow)
    assert [thread.step(number, *step) for number, step in enumerate(steps)] == pytest.approx(expected)


def test_only_steps_that_were_drawn_take_longer():
    thread = Thread(seconds=0.5, probability=0.3, factor=4.0)
    slow = drawn(0, steps=50, probability=0.3)
    taken = [thread.step(number, 0.0, 0.0) for number in range(50)]
    assert taken == pytest.approx([2.0 if each else 0.5 for each in slow]) and {True, False} == set(slow)


def test_the_batches_of_a_step_share_its_time_and_each_sample_of_the_worker_takes_so_long():
    thread = Thread(seconds=0.6)
    thread.step(0, 0.05, 0.1, batches=3)
    assert thread.step(1, 0.05, 0.1, batches=3) == pytest.approx(0.6)
    assert thread.step(2, 0.05, 0.1, batches=1) == pytest.approx(0.6)
    thread = Thread(seconds=0.2, per_sample=0.05, always=2.0)
    taken = [thread.step(number, 0.0, 0.0, samples=samples) for number, samples in enumerate((8, 2, 0))]
    assert taken == pytest.approx([1.2, 0.6, 0.4])
    assert emulation.slowness(Options(emulate_sample=0.05), 0).mean(0.1, 4) == pytest.approx(0.2)
    text = "Computing is emulated: each step takes at least 0.2 s and 0.05 s for each sample of the worker"
    assert emulation.describe(Options(emulate_step=0.2, emulate_sample=0.05)) == [text]


def test_the_expected_time_of_a_step_and_of_those_of_a_slow_worker():
    slow = emulation.slowness(FIVE_PERCENT, rank=2)
    assert slow.mean(0.02) == pytest.approx(0.145) and slow.mean(0.2) == pytest.approx(0.29)
    options = Options(emulate_step=0.1, slow_worker=(4, 3.0))
    assert [emulation.slowness(options, rank).target(0)(0.0) for rank in (3, 4)] == pytest.approx([0.1, 0.3])
    assert emulation.slowness(dataclasses.replace(options, emulate_step=0.0), 3) is None
    assert emulation.slowness(Options(), 0) is None


# -- what is possible -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model():
    return benchmark_module("stragglers")


def test_the_model_agrees_with_the_mean_of_the_slowest_and_of_one_and_more_staleness_is_never_slower(model):
    sync, async_ = (model.steps_per_second(FIVE_PERCENT, 5, bound, 2000, 1) for bound in (0, math.inf))
    assert 1 / sync == pytest.approx(0.1 * (1 + 9 * (1 - 0.95**5)), rel=0.05)
    assert 1 / async_ == pytest.approx(0.145, rel=0.1)
    rates = [model.steps_per_second(FIVE_PERCENT, 5, bound, 150, 10) for bound in (0, 1, 3, 10, math.inf)]
    assert rates == sorted(rates) and rates[3] > 1.6 * rates[0]


def test_a_worker_that_is_always_slow_limits_every_kvstore_and_the_model_waits_as_the_servers_do(model):
    """The first worker may be one step ahead, so the other's long second step delays its fourth."""
    options = Options(emulate_step=0.1, slow_worker=(4, 3.0))
    rates = [model.steps_per_second(options, 5, bound, 100, 2) for bound in (0, 10, math.inf)]
    assert rates == pytest.approx([1 / 0.3] * 3)
    durations = [[1.0, 1.0, 1.0, 1.0], [1.0, 5.0, 1.0, 1.0]]
    assert [model.epoch_seconds(durations, bound) for bound in (0, 1, math.inf)] == [8.0, 8.0, 8.0]
    assert model.epoch_seconds([[1, 1, 1, 9], [1, 5, 1, 1]], 1) == 6 + 9  # its fourth begins after the other's second
    assert model.epoch_seconds([[1, 1, 1, 9], [1, 5, 1, 1]], 2) == 3 + 9
    assert model.epoch_seconds([[1, 1, 1, 9], [1, 5, 1, 1]], 0) == 1 + 5 + 1 + 9


# -- training ---------------------------------------------------------------------------------------------------------


SMALL = ["--num-examples", 256, "--num-epochs", 2]  # 8 steps in an epoch


def test_training_takes_longer_and_learns_the_same(train):  # noqa: F811
    plain, slow = train(*SMALL), train(*SMALL, "--emulate-step", 0.04)
    assert slow.results() == plain.results()
    assert "Computing is emulated: each step takes at least 0.04 s\n" in slow.text
    assert "emulated" not in plain.text
    emulated, own = ([float(each) for each in log.values("Time cost")] for log in (slow, plain))
    assert min(own) < 8 * 0.04 <= min(emulated) < 1.0, "a busy machine may make one epoch longer"


def test_a_resumed_run_has_the_same_stragglers(run, tmp_path):  # noqa: F811
    """A straggling step takes 0.2 s: the time of an epoch says how many there were."""
    words = [*SMALL, "--emulate-step", 0.01, "--stragglers", "0.3:20", "--seed", 4, "--model-prefix", tmp_path / "m"]
    counts = [sum(drawn(0, 4, 16, 0.3)[8 * epoch :][:8]) for epoch in (0, 1)]
    assert counts[1] - counts[0] >= 3, "the first epoch's would be too short"
    whole, resumed = run(*words), run(*words, "--load-epoch", 1)
    least = [0.08 + 0.19 * count for count in counts]  # a busy machine takes longer
    found = [float(each) for each in (*whole.values("Time cost"), *resumed.values("Time cost"))]
    assert all(took >= time - 0.02 for took, time in zip(found, [*least, least[1]], strict=True)), (found, least)


@pytest.mark.parametrize("more", [["--macrobatch-size", 64], ["--devices", "cpu:2"]])
def test_steps_of_several_batches_and_devices(run, more):  # noqa: F811
    """With twice as many emulated steps an epoch would take twice as long."""
    log = run(*SMALL, *more, "--emulate-step", 0.3)
    steps = 4 if "--macrobatch-size" in more else 8
    assert steps * 0.3 <= min(map(float, log.values("Time cost"))) < 2 * steps * 0.3


def test_a_forecast_knows_of_it(monkeypatch, capsys):
    monkeypatch.setenv("DMLTRAIN_MEASURE", "0.2")
    words = ["--dataset", "digits", "--network", "mlp", "--emulate-step", "0.5", "--stragglers", "0.1:11"]
    assert fit.main(words, prog="train") == 0
    assert '"seconds_per_step": 1.0,' in capsys.readouterr().out


# -- jobs -------------------------------------------------------------------------------------------------------------


@pytest.mark.alone
@pytest.mark.thorough
def test_a_job_is_as_fast_as_the_model_allows(tmp_path, model):
    """By the times of the log's lines, in 2 epochs of 25 steps of each of three workers."""
    slow = ["--emulate-step", "0.08", "--stragglers", "0.1:10", "--seed", "1"]
    words = ["--kv-store", "dist_ssp", "--staleness", 10, "--batch-size", 8, "--num-examples", 600, "--num-epochs", 2]
    (log, *_) = finished(tmp_path / "job", 3, 1, *words, "--network", "mlp", "--lr", 0.01, *slow)
    lines = ("Training", "Epoch.1. Speed")
    times = [re.search(rf"(?m)^(\S+ \S+) Node\[0\] {line}", log.text)[1] for line in lines]
    began, ended = (datetime.strptime(each, "%Y-%m-%d %H:%M:%S,%f") for each in times)
    seconds = (ended - began).total_seconds()
    synchronous, allowed = (model.steps_per_second(parse(slow), 3, bound, 25, 2) for bound in (0, 10))
    assert synchronous < 50 / seconds < 1.05 * allowed


@pytest.mark.thorough
def test_who_waits_for_an_average_says_for_whom(tmp_path):
    """Also with local steps the wait is the straggler's, and the emulated computing is not the wait's."""
    words = ["--network", "mlp", "--num-examples", 300, "--batch-size", 15, "--num-epochs", 2, "--emulate-step", 0.05]
    words += ["--kv-store", "dist_local", "--local-steps", 4, "--slow-worker", "1:5"]
    logs = finished(tmp_path / "job", 2, 1, *words)
    parts = r"Communication: .*compute=(\S+) own-host=\S+ wire=\S+ server=\S+ straggler=(\S+)"
    spent = [re.findall(parts, log.text) for log in logs]
    assert all(float(straggler) > 1.2 and float(compute) < 1.2 for compute, straggler in spent[0]), spent
    assert all(float(straggler) < 0.7 and float(compute) > 2.2 for compute, straggler in spent[1]), spent


@pytest.mark.thorough
def test_an_asynchronous_epoch_lasts_until_its_last_worker_is_done(tmp_path):
    """Otherwise the sum of the workers' speeds would be that of a job without the slow one."""
    words = ["--network", "mlp", "--num-examples", 300, "--batch-size", 15, "--num-epochs", 2, "--emulate-step", 0.02]
    logs = finished(tmp_path / "job", 2, 1, *words, "--kv-store", "dist_async", "--slow-worker", "1:5")
    seconds = [[float(each) for each in logs[rank].values("Time cost", rank)] for rank in (0, 1)]
    assert seconds[0] == pytest.approx(seconds[1], abs=0.2) and min(seconds[0]) > 0.9
    spent = [re.findall(r"Communication: .*straggler=(\S+)", log.text) for log in logs]
    assert all(float(each) > 0.5 for each in spent[0]) and all(float(each) < 0.3 for each in spent[1])
