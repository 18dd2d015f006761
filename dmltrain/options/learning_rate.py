"""The options of the group Learning rate, and which policies take them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dmltrain.base.errors import UserError
from dmltrain.optimizers import schedule
from dmltrain.options.field import Group, flag, option
from dmltrain.options.values import integer, integers, number, one_of, path, step_epochs, switch

if TYPE_CHECKING:
    from dmltrain.options.table import Options

GROUP = "Learning rate"
DEFAULTS = schedule.Schedule(1.0, 1)


def with_option(name: str) -> str:
    """The policies that take the option of this field, for help texts and messages."""
    return ", ".join(policy for policy, row in schedule.POLICIES.items() if name in row.takes)


@dataclass(frozen=True)
class LearningRateOptions(Group):
    """See `Options`."""

    equal_on_members = True

    lr: float = option(GROUP, "learning rate; with --lr-policy onecycle the highest one", number(0.0), 0.1)
    lr_policy: str | None = option(
        GROUP,
        f"how the learning rate changes: {', '.join(schedule.POLICIES)} (default: {schedule.POLICY}, MXNet's)",
        one_of("learning-rate policy", schedule.POLICIES),
    )
    lr_factor: float | None = option(
        GROUP,
        "factor of --lr-policy; by default it multiplies the learning rate at each of --lr-step-epochs (default: "
        f"{schedule.FACTOR})",
        number(0.0, above=True),
    )
    lr_step_epochs: tuple[int, ...] = option(
        GROUP,
        "epochs at which --lr-factor applies, for example 30,60; or powX: --lr-policy pow --lr-power X",
        step_epochs,
        (),
        metavar="E,E",
    )
    lr_step_iterations: tuple[int, ...] = option(
        GROUP, "the same in iterations (steps), instead of --lr-step-epochs", integers, (), metavar="I,I"
    )
    lr_power: float | None = option(GROUP, "power of --lr-policy inv, poly and pow", number(0.0))
    lr_by: str = option(
        GROUP,
        "what --lr-policy exp, inv, poly, pow, cosine, linear and onecycle count: iteration or epoch",
        one_of("unit", ("iteration", "epoch")),
        "iteration",
    )
    warmup_epochs: float | None = option(
        GROUP,
        "number of epochs over which the learning rate rises: from 0, with lbsgd from --lr to the rate of large "
        f"batches (default: {schedule.LARGE_BATCH_WARMUP:g} with lbsgd, else 0)",
        number(0.0),
    )
    warmup_strategy: str = option(
        GROUP,
        f"shape of the warm-up: {', '.join(schedule.WARMUPS)}; lars, with lbsgd: a rate for each layer instead",
        one_of("warm-up strategy", (*schedule.WARMUPS, schedule.LARS)),
        "linear",
    )
    warmup_lr: float | None = option(
        GROUP,
        "learning rate of the first step; the step after the warm-up has then --lr, as in timm (default: the rate "
        f"rises from 0, and the warm-up's last step has --lr, as in MXNet; onecycle: --lr / {schedule.RISE:g})",
        number(0.0),
        metavar="RATE",
    )
    warmup_prefix: bool = option(
        GROUP,
        f"{with_option('warmup_prefix')}: 1: begin after the warm-up; 0: begin with the first step, and the warm-up "
        "takes the place of the policy's first part, which is timm's default",
        switch,
        True,
    )
    min_lr: float | None = option(
        GROUP,
        f"{with_option('min_lr')}: the learning rate falls to this (default: 0; onecycle: the first step's rate / "
        f"{schedule.FALL:g})",
        number(0.0),
        metavar="RATE",
    )
    lr_restart_epochs: int | None = option(
        GROUP,
        f"{with_option('lr_restart_epochs')}: the rate starts again at --lr after so many epochs (default: never)",
        integer(1),
        metavar="EPOCHS",
    )
    lr_restart_factor: int = option(
        GROUP,
        f"{with_option('lr_restart_factor')}: each cycle is so many times as long as the one before",
        integer(1),
        DEFAULTS.cycle_factor,
        metavar="FACTOR",
    )
    lr_peak: float | None = option(
        GROUP,
        f"{with_option('lr_peak')}: fraction of the run after which the rate is highest (default: {schedule.PEAK:g})",
        number(0.0),
        metavar="FRACTION",
    )
    show_schedule: str | None = option(
        GROUP,
        "print the learning rates of the run instead of training; with --num-examples without the data; PICTURE: also "
        "draw them into this file, such as rates.png",
        path,
        nargs="?",
        const="",
        metavar="PICTURE",
    )

    @staticmethod
    def check(options: Options) -> None:
        """Refuse what the policy does not take, and rates in the wrong order."""
        name = options.lr_policy or schedule.POLICY
        given = [each for each in OF_POLICIES if getattr(options, each) != getattr(LearningRateOptions, each)]
        for each in given:
            if each not in schedule.POLICIES[name].takes:
                raise UserError(
                    f"{flag(each)} has no effect with --lr-policy {name}: leave it out, or use {with_option(each)}"
                )
        if not schedule.POLICIES[name].warms_up and options.warmup_epochs:
            raise UserError(
                f"--warmup-epochs: --lr-policy {name} has a warm-up of its own; use --lr-peak for its length, and "
                "--warmup-lr for its first rate"
            )
        if options.lr_restart_factor > 1 and options.lr_restart_epochs is None:
            raise UserError("--lr-restart-factor needs --lr-restart-epochs, the length of the first cycle")
        if (options.lr_peak or 0.0) > 1.0:
            raise UserError(f"--lr-peak {options.lr_peak:g}: expected a fraction of the run, from 0 to 1")
        for each in ("min_lr", "warmup_lr"):
            if (getattr(options, each) or 0.0) > options.lr:
                raise UserError(
                    f"{flag(each)} {getattr(options, each):g} is above --lr {options.lr:g}: give at most that"
                )


OF_POLICIES = ("min_lr", "warmup_prefix", "lr_restart_epochs", "lr_restart_factor", "lr_peak")
