"""The options of the group Recipes: what today's training recipes added to those of MXNet and Caffe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dmltrain.backends.backend import WITHOUT_DECAY
from dmltrain.base.errors import UserError
from dmltrain.kvstore import types
from dmltrain.logs.metric import BCE
from dmltrain.options.field import Group, flag, option
from dmltrain.options.values import image_shape, integer, number, path, several_of, switch

if TYPE_CHECKING:
    from dmltrain.options.table import Options

GROUP = "Recipes"


@dataclass(frozen=True)
class RecipeOptions(Group):
    """See `Options`."""

    equal_on_members = True

    recipe: str | None = option(
        GROUP,
        "options of a published recipe, where this command line does not give them; or of a file of your own, such as "
        "mine.yaml; list: print the recipes (see docs/recipes.md)",
        path,
        metavar="NAME",
    )
    label_smoothing: float = option(
        GROUP,
        "share of each label that is spread evenly over all classes, below 1; the metrics of the log are without it",
        number(0.0),
        0.0,
        metavar="SHARE",
    )
    bce_threshold: float | None = option(
        GROUP,
        f"--loss {BCE}: a class whose target is above this counts as 1, any other as 0 (default: targets as they are)",
        number(0.0),
        metavar="TARGET",
    )

    mixup: float = option(
        GROUP,
        "mix each image with the one before it in the batch, in shares drawn from Beta(ALPHA, ALPHA); 0: off",
        number(0.0),
        0.0,
        metavar="ALPHA",
    )
    cutmix: float = option(
        GROUP,
        "give each image a rectangle of the one before it, whose area is drawn from Beta(ALPHA, ALPHA); 0: off",
        number(0.0),
        0.0,
        metavar="ALPHA",
    )
    mixup_prob: float = option(
        GROUP, "--mixup, --cutmix: probability that a batch is mixed", number(0.0), 1.0, metavar="P"
    )
    mixup_switch_prob: float = option(
        GROUP, "probability of cutmix with both --mixup and --cutmix", number(0.0), 0.5, metavar="P"
    )
    val_flip: bool = option(
        GROUP,
        "1: validate the mean of the outputs for an image and for its mirror image",
        switch,
        False,
        nargs="?",
        const=True,
    )
    val_image_shape: tuple[int, int, int] | None = option(
        GROUP,
        "shape of the images of validation: channels,height,width (default: that of --image-shape, the last one)",
        image_shape,
        metavar="C,H,W",
    )

    clip_gradient_norm: float | None = option(
        GROUP,
        "scale gradients down to this norm over all weights if theirs is larger: the mean gradient of all workers, or "
        "each worker's own where servers or a worker alone make the steps",
        number(0.0, above=True),
        metavar="NORM",
    )
    clip_gradient_value: float | None = option(
        GROUP,
        "limit each number of these gradients to this, in both directions; before --clip-gradient-norm",
        number(0.0, above=True),
        metavar="VALUE",
    )
    no_wd_on: tuple[str, ...] = option(
        GROUP,
        "kinds of weights without weight decay, whatever the network says: norms, biases",
        several_of("kind of weights", WITHOUT_DECAY),
        (),
        metavar="KIND,KIND",
    )

    sync_bn: bool = option(
        GROUP,
        "1: batch norms with the statistics of all devices and workers in each step, not of each alone (see "
        "docs/recipes.md)",
        switch,
        False,
        nargs="?",
        const=True,
    )

    ema_decay: float | None = option(
        GROUP,
        "also keep an exponential average of the weights, whose part that stays in each step is this, below 1; it is "
        "validated after each epoch, and saved in the checkpoints",
        number(0.0),
        metavar="DECAY",
    )
    swa_from: int | None = option(
        GROUP,
        "also keep the mean of the weights after this epoch and each later one, counted from 1; validated and saved as "
        "with --ema-decay",
        integer(1),
        metavar="EPOCH",
    )

    @staticmethod
    def check(options: Options) -> None:
        if options.label_smoothing >= 1.0:
            raise UserError(f"--label-smoothing {options.label_smoothing:g}: expected a share below 1")
        if options.bce_threshold is not None and BCE not in options.loss:
            raise UserError(f"{flag('bce_threshold')} needs --loss {BCE}: it is about the targets of that loss")
        _check_mixing(options)
        _check_sync_bn(options)
        _check_average(options)


def _check_mixing(options: Options) -> None:
    given = [flag(name) for name in ("mixup", "cutmix") if getattr(options, name)]
    for name, usual, needed, what in (("mixup_prob", 1.0, 1, "or"), ("mixup_switch_prob", 0.5, 2, "and")):
        value = getattr(options, name)
        if value > 1.0:
            raise UserError(f"{flag(name)} {value:g}: expected a probability, at most 1")
        if value != usual and len(given) < needed:
            raise UserError(f"{flag(name)} needs --mixup {what} --cutmix: it is about the batches that these mix")
    devices = len(options.device_names)
    if given and options.batch_size < 2 * devices:
        raise UserError(
            f"{given[0]} mixes the images that a device gets of a batch, and --batch-size {options.batch_size} leaves "
            f"one without a partner: use --batch-size {2 * devices} or more"
        )


def _check_sync_bn(options: Options) -> None:
    if not options.sync_bn:
        return
    kind = types.find(options.kv_store)
    if kind.distributed and not kind.steps_together:
        raise UserError(
            f"--sync-bn: with --kv-store {options.kv_store} each worker makes steps of its own, so no step has samples "
            "of the others: use --kv-store dist_sync, or leave --sync-bn out"
        )
    if options.compile:
        raise UserError(
            "--sync-bn: a network that --compile has compiled cannot stop at each batch norm for the other workers: "
            "leave one of them out"
        )


def _check_average(options: Options) -> None:
    if options.ema_decay is not None and options.swa_from is not None:
        raise UserError("--ema-decay and --swa-from exclude each other: a run keeps one average; give one of them")
    if (options.ema_decay or 0.0) >= 1.0:
        raise UserError(f"--ema-decay {options.ema_decay:g}: expected a number below 1")
    kind = types.find(options.kv_store)
    if options.ema_decay is not None and kind.distributed and not kind.steps_together:
        raise UserError(
            f"--ema-decay: with --kv-store {options.kv_store} the workers' weights differ between two steps, so there "
            "is no one average of them: use --kv-store dist_sync, or --swa-from, which averages at the ends of epochs"
        )
