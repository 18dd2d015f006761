"""Checks that concern more than one option, or what an option's value needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from typing import Any

from dmltrain import models, optimizers
from dmltrain.backends.backend import Capabilities
from dmltrain.backends.table import BACKENDS
from dmltrain.base.errors import UserError
from dmltrain.kvstore import rules, types
from dmltrain.kvstore.choices import ExchangeChoices
from dmltrain.optimizers import schedule
from dmltrain.options.field import flag
from dmltrain.options.table import GROUPS, Options
from dmltrain.options.values import AUTO, Power

OPTIONS = {
    "kvstore": "kv_store",
    "compression": "gc_type",
    "threshold": "gc_threshold",
}  # by names of rules.CHOICES; the others have the same
SCALED = "float16"  # the type whose gradients need a loss scale
SWITCHES = ("compile", "deterministic", "tf32")
SPELLING = rules.Spelling(
    {name: flag(OPTIONS.get(name, name)) for name in rules.CHOICES},
    " ",
    lambda value: str(int(value) if isinstance(value, bool) else value),
)


def checked(options: Options) -> Options:
    """Check what concerns more than one option; --crop becomes --image-shape."""
    if options.devices and options.gpus:
        raise UserError("--devices and --gpus exclude each other: give one of them")
    _check_fine_tuning(options)
    _check_checkpoints(options)
    models.check_options(options.network, options.network_options)
    _check_exchange(options)
    options = _checked_learning_rate(options)
    _check_optimizer(options)
    _check_factors(options)
    for group in GROUPS:
        group.check(options)
    _check_backend(options)
    check_loss_scale(options)
    if len(options.device_names) > options.batch_size:
        raise UserError(f"--batch-size {options.batch_size} cannot be split over {len(options.device_names)} devices")
    if options.crop is not None:
        if options.image_stages:
            raise UserError(f"--crop {options.crop} and the epochs of --image-shape exclude each other: leave one out")
        channels = options.image_shape[0] if options.image_shape else 3
        options = dataclasses.replace(options, image_shape=(channels, options.crop, options.crop))
    return options


def _checked_learning_rate(options: Options) -> Options:
    """Make `--lr-step-epochs pow2` a policy with its power. Raises UserError for a policy without what it needs."""
    power = options.lr_step_epochs
    if isinstance(power, Power):
        if options.lr_policy not in (None, "pow"):
            raise UserError(
                f"--lr-policy {options.lr_policy} and --lr-step-epochs pow{power.power:g} exclude each other: the "
                "latter is --lr-policy pow; leave one out"
            )
        options = dataclasses.replace(options, lr_policy="pow", lr_power=power.power, lr_step_epochs=())
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


def _check_fine_tuning(options: Options) -> None:
    if options.pretrained_model and not options.model_prefix and options.load_epoch is not None:
        raise UserError(
            "--load-epoch resumes a run of --model-prefix; the epoch of --pretrained-model is written there: "
            "--pretrained-model PREFIX,EPOCH"
        )
    for name, unset in (("layer_before_fullc", None), ("last_lr_mult", 1.0)):
        if getattr(options, name) != unset and not options.pretrained_model:
            raise UserError(
                "--pretrained-model is missing, the PREFIX,EPOCH of the checkpoint to start from: "
                f"{flag(name)} is about its new last layer"
            )


def _check_checkpoints(options: Options) -> None:
    names = ("load_epoch", "load_iteration", "snapshot", "snapshot_on_signal")
    given = [name for name in names if getattr(options, name) not in (None, 0)]
    if given and not options.model_prefix:
        raise UserError(
            f"{flag(given[0])} needs --model-prefix, the PREFIX of the checkpoint's file name PREFIX-0001.pt"
        )
    if options.load_epoch is not None and options.load_iteration is not None:
        raise UserError("--load-epoch and --load-iteration exclude each other: give one of them")


def _check_optimizer(options: Options) -> None:
    if optimizers.BY_NAME[options.optimizer].asynchronous and types.find(options.kv_store).synchronous:
        others = " or ".join(types.names(lambda kind: not kind.synchronous))
        raise UserError(
            f"--optimizer {options.optimizer} compensates for the delay of gradients, and --kv-store "
            f"{options.kv_store} has none: use --kv-store {others}, or --optimizer sgd, which is the same without delay"
        )


def _check_exchange(options: Options) -> None:
    if options.gc_ratio > 1.0:
        raise UserError(f"--gc-ratio {options.gc_ratio:g}: expected a fraction of the elements, at most 1")
    rules.check(SPELLING, exchange_choices(options))


def check_loss_scale(options: Options) -> None:
    """Raise UserError if the steps of --dtype float16 cannot divide gradients by the scale of the loss. Where the
    environment says --update-on-kvstore, or --devices auto is not yet a device, it is to be called again."""
    if options.dtype != SCALED:
        return
    kind, needs = types.find(options.kv_store), f"--dtype {SCALED} scales the loss, and leaves out steps that overflow"
    if kind.steps_on_servers(bool(options.update_on_kvstore)):
        fix = " or ".join(types.names(lambda type_: type_.distributed and "workers" in type_.optimizer_on))
        given = "" if kind.needs_server_optimizer else " --update-on-kvstore 1"
        raise UserError(
            f"{needs}; with --kv-store {options.kv_store}{given} servers make the steps, and know no scale: use "
            f"--kv-store {fix} with the optimizer on the workers, or --dtype bfloat16, which needs no scale"
        )
    row, device = optimizers.BY_NAME[options.optimizer].torch, options.device_names[0].partition(":")[0]
    if row and device != AUTO and not row.takes_loss_scale(device):
        able = [each.name for each in optimizers.TABLE if each.torch and each.torch.takes_loss_scale(device)]
        raise UserError(
            f"{needs}, which optimizer {options.optimizer} does not support here: use one of {', '.join(able)}, or "
            "--dtype bfloat16"
        )


def exchange_choices(options: Options) -> ExchangeChoices:
    """What the options choose of the exchange of gradients, as far as choices exclude each other."""
    return ExchangeChoices(
        options.kv_store,
        {"type": options.gc_type, "threshold": options.gc_threshold},
        options.staleness,
        options.local_steps,
        options.outer_lr,
        options.outer_momentum,
        bool(options.update_on_kvstore),
        None if options.factors == "off" else options.factors,
        server_shares=options.server_shares,
    )


def _check_factors(options: Options) -> None:
    problems = [
        (options.dtype != "float32", f"--dtype {options.dtype}", "--dtype float32"),
        (bool(options.compile), "--compile", "no --compile"),
        (len(options.device_names) > 1, "several devices a worker", "one device for each worker"),
    ]
    for excluded, option, fix in problems if options.factors != "off" else []:
        if excluded:
            raise UserError(
                f"--factors {options.factors} does not work with {option}: use {fix}, or leave --factors out"
            )


def _check_backend(options: Options) -> None:
    """Raise UserError for the first option that the chosen backend does not support; the message says which do."""
    able = {name: backend.capabilities for name, backend in BACKENDS.items()}
    _check_lacks(options, able)
    for name, wanted, offered in _needs(options):
        if wanted in offered(able[options.backend]):
            continue
        others = [f"--backend {other}" for other, can in able.items() if wanted in offered(can)]
        given = flag(name) if name in SWITCHES else f"{flag(name)} {getattr(options, name)}"
        supported = " or ".join(map(str, offered(able[options.backend])))
        fixes = ["leave it out" if name in SWITCHES else f"use {supported}", *others]
        reason = able[options.backend].reasons[name]
        raise UserError(f"{given}: --backend {options.backend} does not support this: {reason}; {', or '.join(fixes)}")


def _check_lacks(options: Options, able: dict[str, Capabilities]) -> None:
    for lacked, reason in able[options.backend].lacks.items():
        name, _, part = lacked.partition("=")
        value = getattr(options, name)
        if part in value if part else value != getattr(Options, name):
            given = f"{flag(name)} {part}" if part else flag(name)
            others = [f"--backend {other}" for other, can in able.items() if lacked not in can.lacks]
            raise UserError(
                f"{given}: --backend {options.backend} does not support this: {reason}; leave it out, or use "
                f"{' or '.join(others)}"
            )


def _needs(options: Options) -> list[tuple[str, Any, Callable[[Capabilities], Collection[Any]]]]:
    """(option, the capability that it needs, what a backend offers)."""

    def arithmetic(can: Capabilities) -> Collection[Any]:
        return (False, True) if can.arithmetic else (False,)

    return [
        ("kv_store", types.find(options.kv_store).name, lambda can: can.kvstores),
        ("gc_type", options.gc_type, lambda can: can.codecs),
        ("transport", options.transport or "auto", lambda can: can.transports),
        ("server_shares", options.server_shares or "equal", lambda can: can.server_shares),
        ("factors", options.factors, lambda can: ("off", "auto") if can.factors else ("off",)),
        ("compile", bool(options.compile), lambda can: (False, True) if can.compile else (False,)),
        *((name, getattr(options, name) is not None, arithmetic) for name in ("deterministic", "tf32")),
        ("dtype", options.dtype, lambda can: can.dtypes),
        ("optimizer", options.optimizer, lambda can: can.optimizers),
    ]
