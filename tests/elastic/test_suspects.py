"""A sample at which two workers fail, one after the other, ends the job; other losses one after another do not.
The speed that a member measures of itself."""

import re

import numpy as np
import pytest

from dmltrain.rounds.member import ROUNDS, SECONDS, SKIPPED, SpeedMeter
from dmltrain.rounds.poison_samples import PoisonSamples
from tests.elastic_job import AUDIT, each_sample_once, make_forker, make_jobs  # noqa: F401

thorough = pytest.mark.thorough


def positions(*values):
    return np.array(values, np.int64)


def blamed(suspects, epoch, *values):
    return suspects.blamed(epoch, positions(*values), "ValueError: 3", lambda found: found * 100)


# -- pure -------------------------------------------------------------------------------------------------------------


def test_the_message_names_what_both_had_and_both_errors():
    suspects = PoisonSamples()
    suspects.add(2, positions(3, 7, 11), "worker 1 on h failed: ValueError: 2")
    said = blamed(suspects, 2, 4, 7, 12)
    for fact in ("sample 700 ", "(position 7 of epoch 2)", "worker 1 on h failed: ValueError: 2;", "ValueError: 3:"):
        assert fact in said
    assert "samples 300, 1100 of the training data (positions 3, 11 of" in blamed(suspects, 2, 3, 11)
    suspects.add(0, positions(*range(30)), "x")
    assert "800, 900 and 20 more of" in blamed(suspects, 0, *range(30)), "ten samples at most"


def test_others_are_not_blamed():
    suspects = PoisonSamples()
    assert blamed(suspects, 0, 1, 2) == ""
    suspects.add(0, positions(1, 2), "x")
    suspects.add(0, positions(), "in a validation")
    assert blamed(suspects, 0, 3, 4) == blamed(suspects, 0) == ""
    assert blamed(suspects, 1, 1, 2) == "", "positions of another epoch are other samples"


def test_a_newcomer_knows_what_the_others_know():
    suspects = PoisonSamples()
    suspects.add(3, positions(1, 2), "x")
    assert blamed(PoisonSamples.of_state(suspects.state()), 3, 2) == blamed(suspects, 3, 2) != ""


# -- jobs -------------------------------------------------------------------------------------------------------------


BOTH = r"two workers have failed at .* of epoch {0}\): worker (\d) on \S+ failed: {1}; then this worker failed: {1}:"


def ended(job, error, epoch=0, code=1):
    """Two workers have failed with this error, and all processes name both. Returns the samples that are named."""
    codes = job.wait()
    text = BOTH.format(epoch, error)
    found = [re.search(text, job.output(name)) for name in codes]
    one = next(int(each[1]) for each in found if each)
    assert sum(each is None for each in found) == 1 and not re.search(text, job.output(f"worker-{one}")), job.outputs()
    assert codes.pop(f"worker-{one}") == code and sorted(codes.values())[-1] == 75, job.outputs()
    named = re.search(r"failed at (?:one of the samples|sample) ([\d, ]+) of", job.output("scheduler-0"))
    return [int(word) for word in named[1].split(", ")]


def test_a_sample_at_which_everybody_fails_is_named_and_ends_the_job(jobs):
    job = jobs.start("any:sample:17", workers=4, servers=1)
    assert 17 in ended(job, "RuntimeError: a bad sample")


@thorough
@pytest.mark.parametrize(
    "fault, workers, error, code",
    [("unreadable", 3, "it is damaged", 75), ("sample", 2, "RuntimeError: a bad sample", 1)],
    ids=["a sample that nobody can read", "the last two workers"],
)
def test_so_do(jobs, fault, workers, error, code):
    job = jobs.start(f"any:{fault}:17", workers=workers, servers=1)
    assert 17 in ended(job, error, code=code)
    assert code == 1 or "Traceback" not in job.outputs()


@thorough
def test_errors_in_steps_with_the_same_samples(jobs):
    """What comes back from the first, once the others have pushed (3 buckets a step), is dealt in the next round."""
    first = "1:before:train_step:4:own once 0/after/pushpull/12 2/after/pushpull/12"
    job = jobs.start(f"{first},2:before:train_step:5:own", workers=3, servers=1)
    assert ended(job, "RuntimeError: this worker's own mistake")


@thorough
@pytest.mark.parametrize("first, second", [("own", "6:own"), ("kill", "5:own")])
def test_other_losses_do_not_end_the_job(jobs, first, second):
    """An error at other samples, and workers that are killed."""
    faults = f"1:before:train_step:4:{first},2:before:train_step:{second}"
    job = jobs.start(faults, *AUDIT, workers=3, servers=1)
    assert job.wait()["worker-0"] == 0, job.outputs()
    each_sample_once(job)
    removed = re.search("Removed from the job: worker 1 on .* RuntimeError: this", job.output("worker-0"))
    assert bool(removed) == (first == "own")


def reports(own, seconds, view=1, samples=10, begin=0.0, pause=1.0):
    """What is reported after rounds that take so many seconds each, one in every `pause` seconds."""
    return [own.round(view, samples, each, begin + pause * index) for index, each in enumerate(seconds)]


def test_the_first_rounds_of_a_view_and_those_of_the_one_before_do_not_count():
    own = SpeedMeter()
    found = reports(own, [100.0] * SKIPPED + [2.0] * ROUNDS)
    assert found == [None] * (SKIPPED + ROUNDS - 1) + [5.0]
    found = reports(own, [100.0] * SKIPPED + [4.0] * ROUNDS, view=2, begin=100.0)
    assert found == [None] * (SKIPPED + ROUNDS - 1) + [2.5]
    own = SpeedMeter()
    reports(own, [1.0] * (SKIPPED + ROUNDS - 1))
    assert [report for report in reports(own, [2.0] * 10, view=2, begin=50.0) if report] == [5.0, 5.0]


def test_it_reports_at_a_low_rate():
    count, pause = 1000, 0.01
    found = [report for report in reports(SpeedMeter(), [0.01] * count, pause=pause) if report is not None]
    assert len(found) == pytest.approx(count * pause / SECONDS, abs=1)


def test_rounds_without_samples_do_not_count_nor_does_one_that_was_held_up():
    assert reports(SpeedMeter(), [1.0] * SKIPPED + [2.0, 50.0, 2.0])[-1] == 5.0
    own = SpeedMeter()
    assert set(reports(own, [0.5] * 10, samples=0)) == {None}
    assert reports(own, [2.0] * ROUNDS, begin=20.0)[-1] == 5.0
