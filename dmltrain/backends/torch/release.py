"""Refuses releases of PyTorch whose `weights_only` can be got around: there a checkpoint can run code."""

from __future__ import annotations

import functools
import re

from dmltrain.base.errors import UserError

OLDEST = (2, 10)  # fixes CVE-2025-32434 and CVE-2026-24747


@functools.cache
def check(version: str | None = None) -> None:
    """Raises UserError unless `version` (default: what is installed) is new enough."""
    if version is None:
        import torch

        version = torch.__version__
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if not numbers or (int(numbers[1]), int(numbers[2])) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise UserError(
            f"PyTorch {version} is installed, expected {oldest} or newer: with older releases a checkpoint can run "
            f"code (CVE-2025-32434, CVE-2026-24747); install it with pip install --upgrade 'torch>={oldest}'"
        )
