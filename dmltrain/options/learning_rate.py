"""Checks of the options of the learning rate."""

from __future__ import annotations

from dataclasses import replace

from dmltrain.base.errors import UserError
from dmltrain.optimizers import schedule
from dmltrain.options.field import flag
from dmltrain.options.table import Options
from dmltrain.options.values import Power


def checked(options: Options) -> Options:
    """Make `--lr-step-epochs pow2` a policy with its power. Raises UserError for a policy without what it needs."""
    power = options.lr_step_epochs
    if isinstance(power, Power):
        if options.lr_policy not in (None, "pow"):
            raise UserError(
                f"--lr-policy {options.lr_policy} and --lr-step-epochs pow{power.power:g} exclude each other: the "
                "latter is --lr-policy pow; leave one out"
            )
        options = replace(options, lr_policy="pow", lr_power=power.power, lr_step_epochs=())
    _check_policy(options)
    if options.warmup_strategy == schedule.LARS and options.optimizer != "lbsgd":
        raise UserError(
            f"--warmup-strategy lars: optimizer {options.optimizer} has no rate for each layer; use --optimizer lbsgd, "
            f"or a strategy of {', '.join(schedule.WARMUPS)}"
        )
    return options


def _check_policy(options: Options) -> None:
    name = options.lr_policy or schedule.POLICY
    policy = schedule.POLICIES[name]
    for needed in policy.needs:
        if getattr(options, needed) is None:
            raise UserError(f"--lr-policy {name} needs {flag(needed)}: the learning rate is --lr * {policy.formula}")
    marks = options.lr_step_iterations or options.lr_step_epochs
    if policy.marked and name != schedule.POLICY and (len(marks) != 1 or marks[0] < 1):
        raise UserError(
            f"--lr-policy {name} needs one number above 0 in --lr-step-epochs or --lr-step-iterations, not "
            f"{','.join(map(str, marks)) or 'none'}: the learning rate is --lr * {policy.formula}"
        )
