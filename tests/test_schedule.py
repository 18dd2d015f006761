"""The learning rate of each step."""

import math

import pytest

from dmltrain import fit, options
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


TORCH = {  # options -> torch's scheduler with the same meaning
    "cosine": lambda torch, made: torch.CosineAnnealingLR(made, 30),
    "cosine --min-lr 0.02": lambda torch, made: torch.CosineAnnealingLR(made, 30, 0.02),
    "cosine --lr-restart-epochs 2": lambda torch, made: torch.CosineAnnealingWarmRestarts(made, 10),
    "cosine --lr-restart-epochs 1 --lr-restart-factor 2 --min-lr 0.1": (
        lambda torch, made: torch.CosineAnnealingWarmRestarts(made, 5, 2, 0.1)
    ),
    "cosine --warmup-epochs 2 --warmup-lr 0.05": lambda torch, made: torch.SequentialLR(
        made, [torch.LinearLR(made, 0.1, total_iters=10), torch.CosineAnnealingLR(made, 20)], [10]
    ),
    "linear --min-lr 0.1": lambda torch, made: torch.LinearLR(made, 1.0, 0.2, 30),
    "onecycle": lambda torch, made: torch.OneCycleLR(made, 0.5, 30),
    "onecycle --lr-peak 0.5 --warmup-lr 0.1 --min-lr 0.01": (
        lambda torch, made: torch.OneCycleLR(made, 0.5, 30, pct_start=0.5, div_factor=5.0, final_div_factor=10.0)
    ),
}


def of_torch(scheduler, steps: int) -> list[float]:
    torch = pytest.importorskip("torch")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.5)
    made, found = scheduler(torch.optim.lr_scheduler, optimizer), []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        made.step()
    return found


@pytest.mark.parametrize("line", TORCH)
def test_each_policy_of_torch_by_iteration(line):
    assert rates(f"--lr-policy {line}") == pytest.approx(of_torch(TORCH[line], 30), rel=1e-6)


def test_policies_of_torch_by_epoch_and_in_a_run_of_some_iterations():
    expected = of_torch(lambda torch, made: torch.CosineAnnealingLR(made, EPOCHS), EPOCHS)
    assert rates("--lr-policy cosine --lr-by epoch") == pytest.approx([x for x in expected for _ in range(STEPS)])
    expected = of_torch(lambda torch, made: torch.OneCycleLR(made, 0.5, 17), 17)
    assert rates("--lr-policy onecycle --max-iter 17") == pytest.approx(expected)


# CosineLRScheduler of timm 1.0.31: lr_min=0.01, warmup_t=10, warmup_lr_init=0.05; by warmup_prefix, t_initial=30 or 20
TIMM_WARM_UP = [0.05, 0.095, 0.14, 0.185, 0.23, 0.275, 0.32, 0.365, 0.41, 0.455]
TIMM = {
    0: (
        *(0.3775, 0.3546505, 0.3307092, 0.3059384, 0.2806095, 0.255, 0.2293905, 0.2040616, 0.1792908, 0.1553495),
        *(0.1325, 0.1109926, 0.091063, 0.0729295, 0.0567908, 0.0428238, 0.0311814, 0.0219912, 0.0153538, 0.0113421),
    ),
    1: (
        *(0.5, 0.4969836, 0.4880088, 0.4732966, 0.4532092, 0.4282412, 0.3990074, 0.3662277, 0.3307092, 0.2933264),
        *(0.255, 0.2166736, 0.1792908, 0.1437723, 0.1109926, 0.0817588, 0.0567908, 0.0367034, 0.0219912, 0.0130164),
    ),
}


@pytest.mark.parametrize("prefix", TIMM)
def test_a_cosine_with_a_warm_up_as_timm(prefix):
    line = f"--lr-policy cosine --warmup-epochs 2 --warmup-lr 0.05 --min-lr 0.01 --warmup-prefix {prefix}"
    assert rates(line) == pytest.approx([*TIMM_WARM_UP, *TIMM[prefix]], abs=1e-7)


def test_without_a_first_rate_a_cosine_warms_up_as_the_other_policies_do():
    found = rates("--lr-policy cosine --warmup-epochs 2")
    assert found[:10] == pytest.approx([0.05 * step for step in range(1, 11)]) and found[10] == 0.5 > found[11]


def test_the_schedule_is_shown_as_text_and_as_a_picture_without_training(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "rates.svg"
    line = (
        "--dataset digits --num-examples 20 --kv-store local --num-epochs 6 --batch-size 4 --lr 0.5 --lr-policy linear"
    )
    assert fit.main([*line.split(), "--show-schedule", str(picture)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == EPOCHS and shown[0] == f"Epoch[0] Learning-rate=0.5 to 0.433333 {'#' * 50}"
    assert shown[-1] == f"Epoch[5] Learning-rate=0.0833333 to 0.0166667 {'#' * 8}"
    assert "linear" in picture.read_text()


def test_a_schedule_needs_no_data_with_their_number_and_says_so_without(tmp_path, capsys):
    line = f"--dataset cifar10 --data-dir {tmp_path} --kv-store local --num-epochs 3 --batch-size 25000 --lr 0.5"
    assert fit.main([*line.split(), "--num-examples", "50000", "--lr-policy", "linear", "--show-schedule"]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("Epoch[1] Learning-rate=0.333333 to 0.25 ")
    assert fit.main([*line.split(), "--show-schedule"]) == 2
    assert "needs the number of training images" in (shown := capsys.readouterr().err) and "--num-examples" in shown
    assert not list(tmp_path.iterdir())


def test_every_policy_is_tried():
    assert {*CAFFE, "pow", *(line.split()[0] for line in TORCH)} == set(POLICIES)


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
