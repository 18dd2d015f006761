"""Checks of the kvstore benchmarks for results of lossy codecs. Uses numpy only.

A single result is not exact, so the checks use the sum of the results of all steps so far. Its error against the sum of
all gradients is bounded for every codec (n workers, gradients of at most G = 30 (rank + 1), sums of at most S):
- bf16, fp16: each push and each result is rounded by at most one part in 2^8 or 2^11; errors may add up over steps;
- int8: with error feedback each residual is at most one of 127 levels, for any number of steps;
- 2bit-threshold: with a threshold t >= G no residual exceeds t on a worker and n t on a server (Seide et al. 2014,
  "1-Bit Stochastic Gradient Descent", section 2: error feedback);
- 2bit, with levels computed from the gradients: the same bound; larger residuals would be a defect;
- topk: values that are sent are exact; every element is between 0 and its sum, since all its gradients have one sign.
"""

from dataclasses import dataclass, field

import numpy as np

from contest.workload import WrongResult, marker

LARGEST = 30.0  # of worker 0's gradients (workload.patterns)
TYPES = ("bf16", "fp16", "int8", "2bit", "2bit-threshold", "topk")
TOPK_RATIO = 0.01


def parameters(codec: str, workers: int) -> dict[str, object]:
    """The parameters for set_gradient_compression; the threshold is the largest gradient, so that residuals stay
    bounded."""
    own = {"2bit-threshold": {"threshold": LARGEST * workers}, "topk": {"ratio": TOPK_RATIO}}
    return {"type": codec.removesuffix("-threshold"), **own.get(codec, {})}


def tolerance(codec: str, workers: int, steps: int, expected: np.ndarray) -> np.ndarray | float:
    """The maximum error of the sum of `steps` results."""
    largest_sum = LARGEST * workers * (workers + 1) / 2
    if codec == "topk":
        return np.abs(expected)
    if codec in ("2bit", "2bit-threshold"):
        return 2.0 * workers * LARGEST * workers
    return {
        "bf16": 2.0**-7 * largest_sum * steps,
        "fp16": 2.0**-10 * largest_sum * steps,
        "int8": 2 * 1.1 * largest_sum / 127,
    }[codec]


@dataclass
class Cumulative:
    """Adds worker `rank`'s results and compares the sums with the gradients that all workers have pushed; see
    Reference."""

    codec: str
    shapes: list[tuple[int, ...]]
    rank: int
    workers: int
    steps: int = 0
    marked: float = 0.0  # sum of the marked elements' sums
    totals: list[np.ndarray] = field(init=False)

    def __post_init__(self) -> None:
        self.totals = [np.zeros(shape, np.float32) for shape in self.shapes]

    def advance(self, step: int) -> None:
        """Record that all workers have made this step."""
        self.steps += 1
        self.marked += marker(step) * self.workers * (self.workers + 1) / 2

    def check_marked(self, results: list[np.ndarray]) -> None:
        """Add this step's results; they cannot be checked alone."""
        for total, result in zip(self.totals, results, strict=True):
            np.add(total, result, out=total)

    def check_all(self, results: list[np.ndarray], sources: list[np.ndarray]) -> None:
        """Raise WrongResult unless the sums over all steps are within the codec's tolerance."""
        scale = np.float32(self.steps * self.workers * (self.workers + 1) / 2 / (self.rank + 1))
        for key, (total, source) in enumerate(zip(self.totals, sources, strict=True)):
            expected = (source * scale).reshape(-1)
            expected[[0, expected.size // 2, -1]] = self.marked
            error = np.abs(total.reshape(-1) - expected)
            wrong = ~(error <= tolerance(self.codec, self.workers, self.steps, expected) + 1e-3)
            if wrong.any():
                raise WrongResult(
                    f"worker {self.rank}, key {key}, {self.codec}: after {self.steps} steps the sums of {wrong.sum()} "
                    f"of {wrong.size} elements are wrong, the first {total.reshape(-1)[wrong][:3]} where they should "
                    f"be near {expected[wrong][:3]}"
                )
        if not any(total.any() for total in self.totals):
            raise WrongResult(f"worker {self.rank}, {self.codec}: all results of {self.steps} steps are zero")
