"""muon: orthogonalised momentum for matrices (Jordan et al. 2024), AdamW for the rest.

Weights of two and more dimensions are matrices with a row for each output, but for the last layer's, and for those with
a single row or column, such as the scales of ConvNeXt's channels. As in Liu et al. 2025 (arXiv 2502.16982) their step
is scaled to the size of AdamW's, so that --lr and --wd serve both. The iteration computes in the type of the weights;
torch.optim.Muon does so in bfloat16.
"""

from __future__ import annotations

import math
from typing import Any

from dmltrain.optimizers.optimizer import Optimizer, momentum
from dmltrain.optimizers.own import Group, ParameterState, array, count, own_torch

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the Newton-Schulz iteration
ITERATIONS, LEAST_NORM = 5, 1e-7
SIZE = 0.2  # root of the mean square of AdamW's steps
BETA1, BETA2, EPSILON = 0.9, 0.95, 1e-8  # of AdamW


def update(torch: Any, weight: Any, gradient: Any, state: ParameterState, group: Group) -> None:
    """`rows` of the group: the number of a matrix's rows where the weight is flat memory, as on a server; the order of
    columns has no effect but rounding."""
    rows = int(group["rows"]) or (weight.shape[0] if weight.dim() > 1 else 0)
    weight.mul_(1.0 - group["lr"] * group["weight_decay"])
    if not (group["matrices"] and 1 < rows < weight.numel()):
        return _adam(torch, weight, gradient, state, group["lr"])
    mean = array(torch, state, "momentum_buffer", weight)
    mean.mul_(group["momentum"]).add_(gradient, alpha=1.0 - group["momentum"])
    ahead = gradient.mul(1.0 - group["momentum"]).add_(mean, alpha=group["momentum"])
    matrix = orthogonal(ahead.reshape(rows, -1))
    weight.sub_(matrix.reshape(weight.shape), alpha=group["lr"] * SIZE * math.sqrt(max(matrix.shape)))


def orthogonal(matrix: Any) -> Any:
    """Nearly the orthogonal factor of the matrix's polar decomposition: its singular values become about 1."""
    a, b, c = COEFFICIENTS
    wide = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    wide = wide / wide.norm().clamp(min=LEAST_NORM)
    for _ in range(ITERATIONS):
        gram = wide @ wide.T
        wide = a * wide + (b * gram + c * (gram @ gram)) @ wide
    return wide.T if matrix.shape[0] > matrix.shape[1] else wide


def _adam(torch: Any, weight: Any, gradient: Any, state: ParameterState, rate: float) -> None:
    step, mean, square = count(state), array(torch, state, "exp_avg", weight), array(torch, state, "exp_avg_sq", weight)
    mean.mul_(BETA1).add_(gradient, alpha=1.0 - BETA1)
    square.mul_(BETA2).addcmul_(gradient, gradient, value=1.0 - BETA2)
    size = square.sqrt().div_(math.sqrt(1.0 - BETA2**step)).add_(EPSILON)
    weight.addcdiv_(mean, size, value=-rate / (1.0 - BETA1**step))


OPTIMIZER = Optimizer(
    "muon",
    own_torch(
        "FlatMuon",
        update,
        {"momentum": 0.95, "matrices": True, "rows": 0},
        arguments=momentum,
        of_last={"matrices": False},
        elementwise=False,
    ),
)
