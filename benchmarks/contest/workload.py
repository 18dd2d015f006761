"""The workload of all contestants in the kvstore benchmark, and the check of their results. Uses numpy only.

The keys are ResNet-50's parameters (He et al. 2015, arXiv:1512.03385, table 1; 25,557,032 float32, 102.2 MB) as exactly
100 arrays. Gradients are small integers times (rank + 1), so their sum over workers is exact in float32 in any order.
Three elements of each array change with the step, so that stale or partly updated results are detected.
"""

import math
from dataclasses import dataclass, field

import numpy as np

KEYS = 100
LEARNING_RATE = 2.0**-10  # a power of two, so that the weights of the first step are exact
MOMENTUM = 0.9


class WrongResult(Exception):
    """A contestant returned wrong sums or weights."""


def resnet50_layers() -> tuple[list[tuple[int, ...]], list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Shapes of ResNet-50's 53 convolutions (out, in, k, k), 106 batch-norm vectors and 2 classifier arrays."""
    convolutions: list[tuple[int, ...]] = [(64, 3, 7, 7)]
    channels = 64
    for blocks, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(blocks):
            convolutions += [(width, channels, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)]
            if block == 0:
                convolutions.append((4 * width, channels, 1, 1))  # the projection shortcut
            channels = 4 * width
    norms: list[tuple[int, ...]] = [(shape[0],) for shape in convolutions for _ in ("gamma", "beta")]
    return convolutions, norms, [(1000, channels), (1000,)]


def resnet50_shapes(keys: int = KEYS) -> list[tuple[int, ...]]:
    """ResNet-50's 161 parameters as `keys` arrays: neighbouring batch-norm vectors are joined to `keys - 55` groups of
    two or three; all others stay separate."""
    convolutions, norms, classifier = resnet50_layers()
    groups = keys - len(convolutions) - len(classifier)
    edges = [len(norms) * group // groups for group in range(groups + 1)]
    joined = [(sum(shape[0] for shape in norms[a:b]),) for a, b in zip(edges, edges[1:], strict=False)]
    return convolutions + joined + classifier


def shapes_of(megabytes: float | None, keys: int = KEYS) -> list[tuple[int, ...]]:
    """ResNet-50's 100 shapes, or `keys` flat arrays with the same proportions and `megabytes` (10^6 bytes) in all.

    For fewer keys neighbours are joined; for more keys the network is repeated.
    """
    shapes = resnet50_shapes()
    if megabytes is None and keys == KEYS:
        return shapes
    sizes = regrouped([math.prod(shape) for shape in shapes], keys)
    factor = (bytes_of(shapes) if megabytes is None else megabytes * 1e6) / (4 * sum(sizes))
    return [(max(4, round(size * factor)),) for size in sizes]


def regrouped(sizes: list[int], count: int) -> list[int]:
    """`count` sizes: sums of neighbours, or, if `count` is larger than their number, the sizes repeated."""
    if count >= len(sizes):
        return [sizes[number % len(sizes)] for number in range(count)]
    edges = [len(sizes) * group // count for group in range(count + 1)]
    return [sum(sizes[a:b]) for a, b in zip(edges, edges[1:], strict=False)]


def bytes_of(shapes: list[tuple[int, ...]]) -> int:
    """Bytes of the float32 arrays of these shapes."""
    return 4 * sum(math.prod(shape) for shape in shapes)


def patterns(shapes: list[tuple[int, ...]], rank: int) -> list[np.ndarray]:
    """Worker `rank`'s gradients: integers -30..30, with a different phase for each key, times (rank + 1)."""
    return [
        (((np.arange(math.prod(shape)) + 7 * key) % 61 - 30) * (rank + 1)).astype(np.float32).reshape(shape)
        for key, shape in enumerate(shapes)
    ]


def write(gradients: list[np.ndarray], sources: list[np.ndarray], rank: int, step: int) -> None:
    """Write a step's gradients, as backward does: the pattern, with the step's marker in the marked elements."""
    for gradient, source in zip(gradients, sources, strict=True):
        np.copyto(gradient, source)
        flat = gradient.reshape(-1)
        flat[0] = flat[flat.size // 2] = flat[-1] = marker(step) * (rank + 1)


def marker(step: int) -> int:
    """The value of the marked elements of worker 0's gradients; it differs in consecutive steps."""
    return step % 7 + 1


@dataclass
class Series:
    """The expected values of one element on the servers: its sum, or its weight and momentum from weight 0 (in
    float64)."""

    value: float = 0.0
    velocity: float = 0.0

    def advance(self, gradient: float, momentum: bool) -> None:
        """Make one step with the summed gradient, as torch's and MXNet's SGD do at a constant learning rate."""
        if not momentum:
            self.value = gradient
            return
        self.velocity = MOMENTUM * self.velocity + gradient
        self.value -= LEARNING_RATE * self.velocity


@dataclass
class Reference:
    """Expected results of worker `rank` of `workers`. They are linear in the gradients, so two series describe all
    elements."""

    momentum: bool
    rank: int
    workers: int
    bulk: Series = field(default_factory=Series)
    marked: Series = field(default_factory=Series)

    def advance(self, step: int) -> None:
        """Record that all workers have made this step."""
        ranks = self.workers * (self.workers + 1) / 2  # sum of (rank + 1)
        self.bulk.advance(ranks, self.momentum)
        self.marked.advance(ranks * marker(step), self.momentum)

    def check_marked(self, results: list[np.ndarray]) -> None:
        """Raise WrongResult unless the marked elements of every result belong to this step."""
        flats = [result.reshape(-1) for result in results]
        found = np.array([(flat[0], flat[flat.size // 2], flat[-1]) for flat in flats])  # (keys, 3)
        if not np.allclose(found, self.marked.value, rtol=1e-4, atol=0):
            key = int(np.argmax(np.abs(found - self.marked.value).max(axis=1)))
            raise WrongResult(f"worker {self.rank}, key {key}: {found[key]}, expected three times {self.marked.value}")

    def check_all(self, results: list[np.ndarray], sources: list[np.ndarray]) -> None:
        """Raise WrongResult unless every element of every result follows from this worker's patterns."""
        self.check_marked(results)
        for key, (result, source) in enumerate(zip(results, sources, strict=True)):
            expected = source * np.float32(self.bulk.value / (self.rank + 1))
            wrong = (np.abs(result - expected) > 1e-4 * np.abs(expected)).reshape(-1) | np.isnan(result).reshape(-1)
            wrong[[0, wrong.size // 2, -1]] = False
            if wrong.any():
                raise WrongResult(
                    f"worker {self.rank}, key {key}: {int(wrong.sum())} of {wrong.size} elements wrong, the first "
                    f"{result.reshape(-1)[wrong][:3]} where this worker pushed {source.reshape(-1)[wrong][:3]}"
                )
