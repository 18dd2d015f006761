"""A rule that changes the kvstore of a running job: when straggler > 30 % set kv_store=dist_ssp staleness=4. Pure."""

from __future__ import annotations

import re

from dmltrain_launch import LaunchError
from dmltrain_launch.agent.value import Value, value
from dmltrain_launch.job.settings import Settings, parse

EXAMPLE = "when straggler > 30 % set kv_store=dist_ssp staleness=4"
MOST_LETTERS = 200
RULE = re.compile(r"\s*when\s+straggler\s*([<>])\s*(\d{1,6}(?:\.\d{1,6})?)\s*%\s+set\s+(\S.*)")


@value(frozen=True)
class Rule(Value):
    """`above`: it holds when the slowest worker computes more than `percent` longer in a step than the median; else
    when less."""

    above: bool
    percent: float
    settings: Settings
    text: str

    def holds(self, percent: float) -> bool:
        return percent > self.percent if self.above else percent < self.percent


def parse_rule(text: str) -> Rule:
    """LaunchError if it is none."""
    match = RULE.fullmatch(text)
    if not match or len(text) > MOST_LETTERS:
        raise LaunchError(f"{text[:MOST_LETTERS]!r}: expected a rule such as {EXAMPLE}")
    return Rule(match[1] == ">", float(match[2]), parse(match[3]), " ".join(text.split()))
