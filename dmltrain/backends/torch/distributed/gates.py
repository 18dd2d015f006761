"""Gates in a model's forward: what has to happen just before the parameters of a bucket are first read.

Straight-line torch.fx networks (layers.py) get an empty module before the first operator that reads a bucket:
nothing to do at run time. Any other model's operators are watched while its forward runs (TorchFunctionMode, about two
microseconds an operator), which sees what is read whoever owns it: tied weights, torch.nn.MultiheadAttention's
out_proj, parametrizations. Under torch.compile, which must not see any of this, all buckets are passed at the start.
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

from dmltrain.backends.torch.distributed.buckets import Bucket

Pass = Callable[[Bucket], None]
COMPILED_CALL = os.path.join("torch", "_dynamo", "eval_frame.py")


def can_have(model: nn.Module) -> bool:
    """TorchScript's operators are seen by nobody."""
    return not any(isinstance(module, (torch.jit.ScriptModule, torch.jit.ScriptFunction)) for module in model.modules())


def before_forward(model: nn.Module, action: Callable[[], None]) -> None:
    """Run `action` at the start of each forward of `model`."""
    quiet = torch.compiler.disable(action)
    model.register_forward_pre_hook(lambda *_: quiet(), prepend=True)  # a function: copies of the model share it


def install(model: nn.Module, buckets: list[Bucket], passing: Pass, pass_all: Callable[[], None]) -> None:
    """In each forward of `model`, call `passing(bucket)` before an operator reads a parameter of it (and maybe more
    often). `model.state_dict()` calls `pass_all` first."""
    model.register_state_dict_pre_hook(lambda *_: pass_all())
    if isinstance(model, fx.GraphModule) and all(node.op != "call_module" for node in model.graph.nodes):
        _insert(model, buckets, passing)
    else:
        _watch(model, buckets, passing, pass_all)


class Gate(nn.Module):
    """A place in straight-line code."""

    def __init__(self, action: Callable[[], None]) -> None:
        super().__init__()
        self._action = torch.compiler.disable(action)

    def forward(self) -> None:
        self._action()


def _insert(model: fx.GraphModule, buckets: list[Bucket], passing: Pass) -> None:
    bucket_of = {parameter: bucket for bucket in buckets for parameter in bucket.parameters}
    named = dict(model.named_parameters(remove_duplicate=False))
    placed: set[Bucket] = set()
    for node in list(model.graph.nodes):
        bucket = bucket_of.get(named[node.target]) if node.op == "get_attr" and node.target in named else None
        if bucket is not None and bucket not in placed:
            placed.add(bucket)
            name = f"gate{len(placed)}"
            model.add_submodule(name, Gate(functools.partial(passing, bucket)))
            with model.graph.inserting_before(node):
                model.graph.call_module(name)
    model.recompile()


def _watch(model: nn.Module, buckets: list[Bucket], passing: Pass, pass_all: Callable[[], None]) -> None:
    gates, forwards = _Reads(buckets, passing), ExitStack()

    def enter() -> None:
        if _inside_compiled():  # compiled code shows its operators to nobody
            pass_all()
        else:
            forwards.enter_context(gates)

    before_forward(model, enter)
    quiet = torch.compiler.disable(forwards.close)
    model.register_forward_hook(lambda *_: quiet(), always_call=True)


def _inside_compiled() -> bool:
    """Whether a caller of this module's hook is what torch.compile returned."""
    frame: FrameType | None = sys._getframe(1)
    inside_module = False
    while frame is not None:
        if frame.f_code.co_filename.endswith(COMPILED_CALL):  # the first one is that of the hook, compiler.disable
            if inside_module:
                return True
        elif frame.f_code.co_filename != __file__:
            inside_module = True
        frame = frame.f_back
    return False


class _Reads(TorchFunctionMode):
    """Sees the arguments of every torch operator."""

    def __init__(self, buckets: Iterable[Bucket], passing: Pass) -> None:
        super().__init__()
        self._bucket_of = {parameter: bucket for bucket in buckets for parameter in bucket.parameters}
        self._passing = passing

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
                    self._passing(bucket)
            elif isinstance(value, (list, tuple)):
                self._look(value)
