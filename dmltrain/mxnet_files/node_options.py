"""The options of one operator of a graph: text in the file, typed here as MXNet's operators take them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from dmltrain.mxnet_files.graph import Node

# Attributes of training and scheduling, which every operator may have (src/c_api/c_api_common.h, kHiddenKeys).
HIDDEN = re.compile(r"__.*__|(.*_)?(ctx_group|lr_mult|wd_mult|force_mirroring|mirror_stage|profiler_scope)")
SPEED = {"workspace", "cudnn_tune", "cudnn_off", "num_args"}  # options that change no result
NONE = ("", "None")


class NotSupported(ValueError):
    """A node cannot be said with dmltrain's layers; the message does not name it."""


class NodeOptions:
    """Reads each option once; what is left at the end was not understood, and is refused."""

    def __init__(self, node: Node) -> None:
        self._left = {name: value for name, value in node.options.items() if not HIDDEN.fullmatch(name)}

    def text(self, name: str, default: str) -> str:
        value = self._left.pop(name, default).strip()
        return default if value in NONE else value

    def choice(self, name: str, valid: tuple[str, ...], default: str = "") -> str:
        value = self.text(name, default)
        if value not in valid:
            raise NotSupported(f"{name}={value or 'nothing'} is not supported; supported: {', '.join(valid)}")
        return value

    def integer(self, name: str, default: int | None = None) -> int:
        with _readable(name, text := self.text(name, "" if default is None else str(default)), "an integer"):
            return int(text)

    def number(self, name: str, default: float | None = None) -> float:
        with _readable(name, text := self.text(name, "" if default is None else str(default)), "a number"):
            return float(text)

    def flag(self, name: str, default: bool) -> bool:
        return self.choice(name, ("True", "False", "true", "false", "1", "0"), str(default)) in ("True", "true", "1")

    def pair(self, name: str, default: int | None = None) -> tuple[int, int]:
        """(height, width), written as (3, 3), [3,3] or (3L, 3L)."""
        if default is not None and self._left.get(name, "").replace(" ", "") in (*NONE, "()", "[]"):
            self._left.pop(name, None)
            return default, default
        with _readable(name, text := self.text(name, ""), "(height, width)"):
            inside = re.fullmatch(r"[(\[](.*?),?[)\]]", text.replace(" ", ""))
            height, width = (int(word.removesuffix("L")) for word in (inside[1] if inside else text).split(","))
            return height, width

    def expect(self, **usual: str) -> None:
        """Refuse options that have another value than the usual one. Values are compared without spaces."""
        for name, value in usual.items():
            actual = self.text(name, value).replace(" ", "")
            if actual != value:
                raise NotSupported(f"{name}={actual} is not supported; supported: {value}")

    def finish(self) -> None:
        left = sorted(self._left.keys() - SPEED)
        if left:
            raise NotSupported(f"option {left[0]}={self._left[left[0]][:50]} is not supported")


@contextmanager
def _readable(name: str, text: str, expected: str) -> Iterator[None]:
    try:
        yield
    except ValueError:
        raise NotSupported(f"{name} is {text[:50] or 'missing'}, expected {expected}") from None
