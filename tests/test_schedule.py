"""The learning rate of each step."""

import math

import pytest

from dmltrain import options
from dmltrain.optimizers.schedule import POLICIES, Schedule
from dmltrain.train.plan import Plan, Position, plan_of, schedule_of

STEPS, EPOCHS = 5, 6


def test_steps_by_epoch_as_mxnet_and_none_with_a_factor_of_one_or_more():
    rate = Schedule(base=0.1, batches=5, factor=0.1, step_epochs=(2, 3))
    assert [rate(epoch, batch) for epoch, batch in [(0, 0), (1, 4)]] == [0.1, 0.1]
    assert rate(2, 0) == pytest.approx(0.01)
    assert rate(3, 0) == rate(9, 4) == pytest.approx(0.001)
    assert Schedule(base=0.1, batches=5, factor=1.5, step_epochs=(1,))(4, 0) == 0.1


@pytest.mark.parametrize("warmup, middle", [("linear", 0.5), ("power2", 0.25), ("sqrt", 0.5**0.5)])
def test_warm_up_rises_and_its_last_step_has_the_full_rate(warmup, middle):
    rate = Schedule(base=1.0, batches=10, warmup_epochs=2, warmup=warmup)
    rates = [rate(epoch, batch) for epoch in range(3) for batch in range(10)]
    assert rates[9] == pytest.approx(middle)
    assert rates == sorted(rates) and rates[0] > 0
    assert rates[18] < 1.0 and set(rates[19:]) == {1.0}


def rates(line: str, batches: int = STEPS, workers: int = 1) -> list[float]:
    """Of a run of 6 epochs with 5 batches of 4 samples, from its options."""
    given = options.parse(["--num-epochs", str(EPOCHS), "--batch-size", "4", "--lr", "0.5", *line.split()])
    plan = plan_of(given, batches, workers)
    schedule = schedule_of(given, plan)
    return [schedule(*divmod(iteration, plan.steps)) for iteration in range(plan.iterations)]


def caffe(policy: str, t: int, gamma=0.0, power=0.0, mark=0, end=STEPS * EPOCHS) -> float:
    """The comment on GetLearningRate in sgd_solver.cpp, with base_lr 0.5."""
    factors = {
        "fixed": lambda: 1.0,
        "step": lambda: gamma ** math.floor(t / mark),
        "exp": lambda: gamma**t,
        "inv": lambda: (1 + gamma * t) ** (-power),
        "multistep": lambda: gamma ** ((t >= 7) + (t >= 19)),
        "poly": lambda: (1 - t / end) ** power,
        "sigmoid": lambda: 1 / (1 + math.exp(-gamma * (t - mark))),
    }
    return 0.5 * factors[policy]()


CAFFE = {
    "fixed": ("", {}),
    "step": ("--lr-factor 0.5 --lr-step-iterations 4", {"gamma": 0.5, "mark": 4}),
    "exp": ("--lr-factor 0.9", {"gamma": 0.9}),
    "inv": ("--lr-factor 0.01 --lr-power 0.75", {"gamma": 0.01, "power": 0.75}),
    "multistep": ("--lr-factor 0.5 --lr-step-iterations 7,19", {"gamma": 0.5}),
    "poly": ("--lr-power 0.5", {"power": 0.5}),
    "sigmoid": ("--lr-factor 0.3 --lr-step-iterations 10", {"gamma": 0.3, "mark": 10}),
}


@pytest.mark.parametrize("policy", CAFFE)
def test_each_policy_of_caffe_by_iteration(policy):
    line, values = CAFFE[policy]
    expected = [caffe(policy, t, **values) for t in range(STEPS * EPOCHS)]
    assert rates(f"--lr-policy {policy} {line}") == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("policy", ["step", "exp", "inv", "poly", "sigmoid"])
def test_each_policy_by_epoch_changes_at_epochs_only(policy):
    line, values = CAFFE[policy]
    line = line.replace("iterations 4", "epochs 2").replace("iterations 10", "epochs 3") + " --lr-by epoch"
    values = {**values, "mark": {"step": 2, "sigmoid": 3}.get(policy, 0), "end": EPOCHS}
    expected = [caffe(policy, epoch, **values) for epoch in range(EPOCHS) for _ in range(STEPS)]
    assert rates(f"--lr-policy {policy} {line}") == pytest.approx(expected, rel=1e-12)


def test_every_policy_is_tried():
    assert {*CAFFE, "pow"} == set(POLICIES)


def test_a_sigmoid_far_from_its_mark_pow_without_a_factor_below_one_and_the_end_of_the_polynomial():
    assert rates("--lr-policy sigmoid --lr-factor 100 --lr-step-iterations 20")[0] == 0.0
    assert set(rates("--lr-step-epochs pow2 --lr-factor 1")) == {0.5}
    found = rates("--lr-policy poly --lr-power 1 --max-iter 13")
    assert found == pytest.approx([0.5 * (1 - t / 13) for t in range(13)])


@pytest.mark.parametrize("spelling", ["pow2", "pow-2", "pow 2"])
def test_pow_is_mxnets_polynomial(mx, spelling):
    """With the updates that MXNet's optimizers count: the first is number 1."""
    scheduler = mx.lr_scheduler.PolyScheduler(STEPS * EPOCHS, 0.5, 2.0)
    given = options.parse(["--lr", "0.5", "--num-epochs", str(EPOCHS), "--lr-step-epochs", spelling])
    schedule = schedule_of(given, plan_of(given, STEPS, 1))
    found = [schedule(epoch, step) for epoch in range(EPOCHS) for step in range(STEPS)]
    assert found == pytest.approx([scheduler(update) for update in range(1, STEPS * EPOCHS + 1)], rel=1e-12)
    assert found[-1] == 0.0


# -- large batches ----------------------------------------------------------------------------------------------------


def test_only_lbsgd_warms_up_by_default_and_lars_leaves_the_rate_to_it():
    assert set(rates("")) == {0.5}
    found = rates("--optimizer lbsgd --macrobatch-size 8", batches=10)
    assert found == sorted(found) and 0.5 < found[0] < 0.55 and found[23] < 1.0 and set(found[24:]) == {1.0}
    assert set(rates("--optimizer lbsgd --macrobatch-size 24 --warmup-strategy lars", batches=9)) == {0.5}


def test_lbsgd_rises_from_the_rate_to_that_of_large_batches_as_mxnet():
    """LBSGD._get_lbmult of MXNet, for the batch that completes each step."""
    for strategy, shape in {"linear": lambda p: p, "power2": lambda p: p * p, "sqrt": math.sqrt}.items():
        line = f"--optimizer lbsgd --macrobatch-size 24 --warmup-epochs 2 --warmup-strategy {strategy}"
        scale, warm_up = 3, 2 * 9
        batches = [3 * step + 3 for step in range(3 * EPOCHS)]
        expected = [0.5 * (1 + (scale - 1) * min(1.0, shape(min(batch, warm_up) / warm_up))) for batch in batches]
        assert rates(line, batches=9, workers=2) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("size, group", [(0, 1), (7, 1), (8, 1), (9, 2), (16, 2), (17, 3)])
def test_a_macrobatch_is_rounded_up_to_batches_of_all_workers(size, group):
    given = options.parse(["--batch-size", "4", "--macrobatch-size", str(size)])
    assert plan_of(given, 10, 2).group == group


def test_positions_of_a_run_that_ends_in_an_epoch():
    plan = Plan(batches=10, group=3, iterations=11)
    assert (plan.steps, plan.epochs) == (4, 3)
    assert [plan.steps_of(epoch) for epoch in range(3)] == [4, 4, 3]
    assert [plan.after(epoch, plan.steps_of(epoch)) for epoch in range(3)] == [(1, 0), (2, 0), (2, 3)]
    for iteration in range(12):
        assert plan.iteration(plan.position(iteration)) == iteration
    assert plan.saved(Position(2, 3)) == (2, 11) and plan.saved(Position(2)) == (2, 0)
