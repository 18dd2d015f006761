"""Gates in a model's forward: actions just before the parameters of a bucket are first read.

Straight-line torch.fx networks (layers.py) get an extra module before the first operator that reads a bucket, which
costs almost nothing at run time. For other models a TorchFunctionMode watches the operators of each forward (about two
microseconds per operator). So it finds every read, whichever module owns the weights: tied weights, out_proj of
torch.nn.MultiheadAttention, parametrizations. torch.compile must not see gates; there all actions run at the start.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from types import FrameType
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from dmltrain.backends.torch import plain_step
from dmltrain.backends.torch.distributed.buckets import Bucket

Action = Callable[[Bucket], None]
COMPILED_CALL = os.path.join("torch", "_dynamo", "eval_frame.py")


def can_have(model: nn.Module) -> bool:
    """Whether the model's reads can be observed. TorchScript's cannot."""
    return not any(isinstance(module, (torch.jit.ScriptModule, torch.jit.ScriptFunction)) for module in model.modules())


def before_forward(model: nn.Module, action: Callable[[], None]) -> None:
    """Run `action` at the start of each forward of `model`."""
    quiet = uncompiled(action)
    model.register_forward_pre_hook(
        lambda *_: quiet(), prepend=True
    )  # not a bound method: copies of the model share it


def uncompiled(action: Callable[[], None]) -> Callable[[], None]:
    """`action`, which torch.compile does not follow. Unlike torch.compiler.disable this does not import torch.compile's
    machinery, see plain_step.py."""
    disabled: Callable[[], None] | None = None

    def call() -> None:
        nonlocal disabled
        if plain_step.COMPILER not in sys.modules:
            return action()
        disabled = disabled or torch.compiler.disable(action)
        return disabled()

    return call


def install(model: nn.Module, buckets: list[Bucket], before: Action, before_all: Callable[[], None]) -> None:
    """In each forward of `model`, call `before(bucket)` at least once before an operator reads a parameter of it.
    `model.state_dict()` calls `before_all` first."""
    model.register_state_dict_pre_hook(lambda *_: before_all())
    if isinstance(model, fx.GraphModule) and all(node.op != "call_module" for node in model.graph.nodes):
        _insert(model, buckets, before)
    else:
        _watch(model, buckets, before, before_all)


class Gate(nn.Module):
    """A module that runs an action in straight-line code."""

    def __init__(self, action: Callable[[], None]) -> None:
        super().__init__()
        self._action = uncompiled(action)

    def forward(self) -> None:
        self._action()


def _insert(model: fx.GraphModule, buckets: list[Bucket], before: Action) -> None:
    bucket_of = {parameter: bucket for bucket in buckets for parameter in bucket.parameters}
    named = dict(model.named_parameters(remove_duplicate=False))
    placed: set[Bucket] = set()
    for node in list(model.graph.nodes):
        bucket = bucket_of.get(named[node.target]) if node.op == "get_attr" and node.target in named else None
        if bucket is not None and bucket not in placed:
            placed.add(bucket)
            name = f"gate{len(placed)}"
            model.add_submodule(name, Gate(functools.partial(before, bucket)))
            with model.graph.inserting_before(node):
                model.graph.call_module(name)
    model.recompile()


def _watch(model: nn.Module, buckets: list[Bucket], before: Action, before_all: Callable[[], None]) -> None:
    gates, forwards = _Reads(buckets, before), ExitStack()

    def enter() -> None:
        if _inside_compiled():  # operators of compiled code cannot be observed
            before_all()
        else:
            forwards.enter_context(gates)

    before_forward(model, enter)
    quiet = uncompiled(forwards.close)
    model.register_forward_hook(lambda *_: quiet(), always_call=True)


def _inside_compiled() -> bool:
    """Whether a result of torch.compile is among the callers of this module's hook."""
    frame: FrameType | None = sys._getframe(1)
    inside_module = False
    while frame is not None:
        if frame.f_code.co_filename.endswith(COMPILED_CALL):  # the first is the hook's compiler.disable
            if inside_module:
                return True
        elif frame.f_code.co_filename != __file__:
            inside_module = True
        frame = frame.f_back
    return False


class _Reads(TorchFunctionMode):
    """Looks for parameters in the arguments of every torch operator."""

    def __init__(self, buckets: Iterable[Bucket], before: Action) -> None:
        super().__init__()
        self._bucket_of = {parameter: bucket for bucket in buckets for parameter in bucket.parameters}
        self._before = before

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._look(args)
        if kwargs:
            self._look(kwargs.values())
        return func(*args, **(kwargs or {}))

    def _look(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, nn.Parameter):
                bucket = self._bucket_of.get(value)
                if bucket is not None:
                    self._before(bucket)
            elif isinstance(value, (list, tuple)):
                self._look(value)
