"""From the text of an option's value to the value. A wrong text raises argparse.ArgumentTypeError."""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Callable, Collection
from typing import Any

from dmltrain import models
from dmltrain.models import graph_file

LAST = -1  # --load-epoch last
AUTO = "auto"  # --devices auto


def integer(minimum: int) -> Callable[[str], int]:
    def parse_integer(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = minimum - 1
        if value < minimum:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least {minimum}")
        return value

    return parse_integer


def switch(text: str) -> bool:
    """'1' -> True, '0' -> False."""
    if text not in ("0", "1"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither 1 (on) nor 0 (off)")
    return text == "1"


def epoch_or_last(text: str) -> int:
    return LAST if text == "last" else integer(0)(text)


def number(minimum: float, *, above: bool = False) -> Callable[[str], float]:
    """A parser of finite numbers of at least `minimum`, or with `above` of numbers greater than it."""

    def parse_number(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value < minimum or (above and value == minimum):
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a number {'above' if above else 'of at least'} {minimum:g}"
            )
        return value

    return parse_number


def integers(text: str) -> tuple[int, ...]:
    """'200,250' -> (200, 250); '' -> ()."""
    return tuple(integer(0)(part) for part in text.replace(" ", "").split(",") if part)


class Power(tuple[int, ...]):
    """`--lr-step-epochs pow2`: no epochs, but a policy's power."""

    power: float


def step_epochs(text: str) -> tuple[int, ...]:
    """'30,60' -> (30, 60); 'pow2', 'pow 2' and 'pow-2', as in MXNet's fit.py -> Power."""
    match = re.fullmatch(r"pow[- ]*(.*)", text.strip())
    if not match:
        return integers(text)
    power = Power()
    power.power = number(0.0)(match[1])
    return power


def numbers(text: str) -> tuple[float, ...]:
    """'123.68,116.779,103.939' -> (123.68, 116.779, 103.939)."""
    values = tuple(number(0.0)(part) for part in text.replace(" ", "").split(","))
    if len(values) not in (1, 3):
        raise argparse.ArgumentTypeError(f"{text!r}: expected one number, or one for each of R,G,B")
    return values


def one_of(kind: str, names: Collection[str], remark: str = "") -> Callable[[str], str]:
    def parse_name(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"unknown {kind} {text!r}{remark}; valid: {', '.join(sorted(names))}")
        return text

    return parse_name


def several_of(kind: str, names: Collection[str]) -> Callable[[str], tuple[str, ...]]:
    """'ce,nll_loss' -> ('ce', 'nll_loss'); '' -> ()."""
    parse_one = one_of(kind, names)
    return lambda text: tuple(parse_one(part.strip()) for part in text.split(",") if part.strip())


def network_name(text: str) -> str:
    """Case and `_` do not matter, as in MXNet's scripts: 'Inception_BN_28_small' -> 'inception-bn-28-small'. A file's
    name stays as it is."""
    if graph_file.is_graph(text):
        return path(text)
    return one_of("network", models.NETWORKS)(text.strip().lower().replace("_", "-"))


def image_shape(text: str) -> tuple[int, int, int]:
    """'3,28,28' -> (3, 28, 28): channels, height, width."""
    sizes = integers(text)
    if len(sizes) != 3 or min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected channels,height,width such as 3,28,28")
    return sizes[0], sizes[1], sizes[2]


class ShapeByEpoch(tuple[int, int, int]):
    """`--image-shape 3,128,128:0 3,192,192:6`: the last shape, which is the network's. `stages`: the first epoch of
    each, and the shape."""

    stages: tuple[tuple[int, tuple[int, int, int]], ...] = ()

    def __str__(self) -> str:
        """As on the command line: what members of an elastic job compare."""
        return " ".join(f"{','.join(map(str, shape))}:{first}" for first, shape in self.stages)


def shape_by_epoch(text: str) -> tuple[int, int, int]:
    """'3,28,28' -> (3, 28, 28); '3,28,28:6' -> a ShapeByEpoch."""
    sizes, colon, first = text.partition(":")
    if not colon:
        return image_shape(sizes)
    found = ShapeByEpoch(image_shape(sizes))
    found.stages = ((integer(0)(first), image_shape(sizes)),)
    return found


class JoinStages(argparse.Action):
    """Of several words of `shape_by_epoch`: the last, with the stages of all."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        stages = [stage for value in values for stage in getattr(value, "stages", ())]
        epochs, channels = [first for first, _ in stages], {shape[0] for _, shape in stages}
        rise = epochs == sorted(set(epochs)) and epochs[:1] in ([], [0])
        if not rise or len(stages) < len(values) > 1 or len(channels) > 1:
            expected = "expected one shape, or some of as many channels with rising epochs: 3,128,128:0 3,224,224:12"
            raise argparse.ArgumentError(self, expected)
        if stages:
            values[-1].stages = tuple(stages)
        setattr(namespace, self.dest, values[-1])


def device_list(text: str) -> tuple[str, ...]:
    """'cpu' -> ('cpu',); 'cpu:2' -> ('cpu', 'cpu'); 'gpu:2' -> ('gpu:0', 'gpu:1'); 'auto' -> ('auto',)."""
    if text == AUTO:
        return (AUTO,)
    kind, _, count = text.partition(":")
    if kind not in ("cpu", "gpu"):
        raise argparse.ArgumentTypeError(f"{text!r}: expected cpu, cpu:COUNT, gpu:COUNT or auto")
    indices = range(integer(1)(count or "1"))
    return tuple("cpu" if kind == "cpu" else f"gpu:{index}" for index in indices)


def gpu_list(text: str) -> tuple[str, ...]:
    """'0,2' -> ('gpu:0', 'gpu:2'); '' -> (), the CPU, as in MXNet."""
    indices = integers(text)
    if len(set(indices)) != len(indices):
        raise argparse.ArgumentTypeError(f"{text!r} names the same GPU twice")
    return tuple(f"gpu:{index}" for index in indices)


def path(text: str) -> str:
    return os.path.expanduser(text)


def as_words(value: Any) -> str:
    """An option's value as it stands on the command line."""
    if isinstance(value, bool):
        return str(int(value))
    is_list = isinstance(value, tuple) and not isinstance(value, ShapeByEpoch)
    return ",".join(map(as_words, value)) if is_list else str(value)
