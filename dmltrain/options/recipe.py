"""The options of the group Recipes: the loss of today's training recipes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dmltrain.base.errors import UserError
from dmltrain.logs.metric import BCE
from dmltrain.options.field import Group, flag, option
from dmltrain.options.values import number

if TYPE_CHECKING:
    from dmltrain.options.table import Options

GROUP = "Recipes"


@dataclass(frozen=True)
class RecipeOptions(Group):
    """See `Options`."""

    equal_on_members = True

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

    @staticmethod
    def check(options: Options) -> None:
        if options.label_smoothing >= 1.0:
            raise UserError(f"--label-smoothing {options.label_smoothing:g}: expected a share below 1")
        if options.bce_threshold is not None and BCE not in options.loss:
            raise UserError(f"{flag('bce_threshold')} needs --loss {BCE}: it is about the targets of that loss")
