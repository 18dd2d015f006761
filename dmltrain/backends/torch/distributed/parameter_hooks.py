"""Gates in a model's forward: actions that run just before the parameters of a bucket are first read.

Straight-line torch.fx networks (layers.py) get an extra module before the first operator that reads a bucket, which
costs almost nothing at run time. For other models a TorchFunctionMode watches the operators of each forward (about two
microseconds per operator). So every read is seen, whichever module owns the weights: tied weights, out_proj of
torch.nn.MultiheadAttention, parametrizations. torch.compile must not trace gates: in a compiled model all actions run
at the start of the forward.
"""

from __future__ import annotations

import functools
import os
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from types import FrameType
from typing import Any, TypeGuard

import torch
from torch import fx, nn
from torch.nn import functional
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

from dmltrain.backends.torch import plain_step
from dmltrain.backends.torch.distributed.buckets import Bucket
from dmltrain.backends.torch.distributed.factors import FactoredBucket
from dmltrain.base.errors import UserError

Action = Callable[[Bucket], None]
COMPILED_CALL = os.path.join("torch", "_dynamo", "eval_frame.py")


def can_have(model: nn.Module) -> bool:
    """Whether the model's reads can be observed. TorchScript's cannot."""
    return not any(isinstance(module, (torch.jit.ScriptModule, torch.jit.ScriptFunction)) for module in model.modules())


class Hook:
    """A hook of a module: runs `action`. Copies of the module share the hook. A pickle of the module does not contain
    it, so the pickle can be loaded without dmltrain. `settle` completes the weights before they are copied."""

    def __init__(self, model: nn.Module, action: Callable[[], None], settle: Callable[[], None] | None = None) -> None:
        self._model = weakref.ref(model)
        self._action, self._settle = uncompiled(action), settle

    def __call__(self, *_: Any) -> None:
        self._action()

    def __deepcopy__(self, memo: dict[int, Any]) -> Hook:
        model = self._model()
        if self._settle is not None and model is not None:
            self._settle()
            for parameter in model.parameters():
                if id(parameter) in memo:  # copied before `settle` completed it
                    memo[id(parameter)].data.copy_(parameter.data)
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        if self._settle is not None:
            self._settle()  # in time: torch.save writes the weights last
        return functools.partial, (sys.audit, "dmltrain.hook")  # does nothing


def before_forward(model: nn.Module, action: Callable[[], None], settle: Callable[[], None] | None = None) -> None:
    """Run `action` at the start of each forward of `model`."""
    model.register_forward_pre_hook(Hook(model, action, settle), prepend=True)


def uncompiled(action: Callable[[], None]) -> Callable[[], None]:
    """`action`, which torch.compile does not follow. Unlike torch.compiler.disable this does not import torch.compile's
    machinery, see plain_step.py."""
    disabled: Callable[[], None] | None = None

    def call() -> None:
        nonlocal disabled
        if plain_step.COMPILER not in sys.modules:
            action()
        else:
            disabled = disabled or torch.compiler.disable(action)
            disabled()

    return call


def install(model: nn.Module, buckets: list[Bucket], before: Action, before_all: Callable[[], None]) -> None:
    """In each forward of `model`, call `before(bucket)` at least once before an operator reads a parameter of that
    bucket. `model.state_dict()` first calls `before_all`."""
    model.register_state_dict_pre_hook(Hook(model, before_all, before_all))
    if _is_straight(model):
        _insert(model, buckets, before)
    else:
        _watch(model, buckets, before, before_all)


def _is_straight(model: nn.Module) -> TypeGuard[fx.GraphModule]:
    """Whether the model is straight-line code that calls no modules but those of this file."""
    if not isinstance(model, fx.GraphModule):
        return False
    called = [model.get_submodule(str(node.target)) for node in model.graph.nodes if node.op == "call_module"]
    return all(isinstance(function, (Gate, FactoredDense)) for function in called)


def dense_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """The weights of dense layers whose factors can be kept, by name: each is used by one layer only."""
    named = dict(model.named_parameters(remove_duplicate=False))
    if _is_straight(model):
        used = [name for node in model.graph.nodes if (name := _weight_of(node))]
    else:
        layers = [(name, module) for name, module in model.named_modules() if type(module) is nn.Linear]
        used = [
            f"{name}.weight" if name else "weight" for name, module in layers if not parametrize.is_parametrized(module)
        ]
    count = Counter(map(id, named.values()))
    once = [name for name in used if name in named and used.count(name) == 1]
    return {name: named[name] for name in once if count[id(named[name])] == 1}


def _weight_of(node: fx.Node) -> str:
    """The name of the weight if the node is a dense layer whose weight is read for it; else ""."""
    if node.target is not functional.linear:
        return ""
    weight = node.args[1] if len(node.args) > 1 else node.kwargs.get("weight")
    return str(weight.target) if isinstance(weight, fx.Node) and weight.op == "get_attr" else ""


class Gate(nn.Module):
    """A module that runs an action in straight-line code."""

    def __init__(self, action: Callable[[], None]) -> None:
        super().__init__()
        self._action = uncompiled(action)

    def __deepcopy__(self, memo: dict[int, Any]) -> Gate:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return nn.Identity, ()

    def forward(self, _: None) -> None:
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
                model.graph.call_module(name, (None,))
    model.recompile()


def factor(model: nn.Module, buckets: Sequence[FactoredBucket]) -> None:
    """Let the dense layers of these buckets keep their factors."""
    if _is_straight(model):
        return _replace(model, buckets)

    def refuse() -> None:
        raise UserError(
            "factors are not kept in code of torch.compile: train without factors, or without torch.compile"
        )

    _observe(model, _FactoredDenseMode(buckets), refuse)


def _replace(model: fx.GraphModule, buckets: Sequence[FactoredBucket]) -> None:
    """In straight-line code a module takes the place of the operator."""
    bucket_of = {bucket.weight: bucket for bucket in buckets}
    named = dict(model.named_parameters(remove_duplicate=False))
    for number, node in enumerate(list(model.graph.nodes)):
        weight = named.get(_weight_of(node))
        if weight in bucket_of:
            model.add_submodule(f"factored{number}", FactoredDense(bucket_of[weight]))
            named_arguments = {_name(name): value for name, value in node.kwargs.items()}
            with model.graph.inserting_before(node):
                dense = model.graph.call_module(f"factored{number}", node.args, named_arguments)
            node.replace_all_uses_with(dense)
            model.graph.erase_node(node)
    model.recompile()


class FactoredDense(nn.Module):
    """functional.linear of a bucket, in straight-line code."""

    def __init__(self, bucket: FactoredBucket) -> None:
        super().__init__()

        def linear(*arguments: Any) -> torch.Tensor:  # no bound method: copies of the model share it
            return bucket.linear(*arguments)

        self._linear = linear

    def __reduce__(self) -> tuple[Any, ...]:
        raise UserError("a model whose layers send factors cannot be saved whole: save model.state_dict()")

    def __deepcopy__(self, memo: dict[int, Any]) -> FactoredDense:
        return self

    def forward(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self._linear(x, weight, bias)


class _FactoredDenseMode(TorchFunctionMode):
    """Lets buckets apply their dense layers."""

    def __init__(self, buckets: Iterable[FactoredBucket]) -> None:
        super().__init__()
        self._bucket_of = {bucket.weight: bucket for bucket in buckets}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if func is functional.linear:
            weight = args[1] if len(args) > 1 else named["weight"]
            if weight in self._bucket_of:
                func = self._bucket_of[weight].linear
                named = {_name(name): value for name, value in named.items()}
        return func(*args, **named)


def _name(argument: str) -> str:
    """What `FactoredBucket.linear` calls an argument of functional.linear."""
    return "x" if argument == "input" else argument


def _watch(model: nn.Module, buckets: list[Bucket], before: Action, before_all: Callable[[], None]) -> None:
    _observe(model, _ReadsMode(buckets, before), before_all)


def _observe(model: nn.Module, mode: TorchFunctionMode, compiled: Callable[[], None]) -> None:
    """Let `mode` see the operators of each forward of `model`. In compiled code, whose operators cannot be observed,
    call `compiled` instead."""
    forwards = ExitStack()

    def enter() -> None:
        if _inside_compiled():
            compiled()
        else:
            forwards.enter_context(mode)

    before_forward(model, enter)
    model.register_forward_hook(Hook(model, forwards.close), always_call=True)


def _inside_compiled() -> bool:
    """Whether a result of torch.compile is among the callers of this module's hook."""
    frame: FrameType | None = sys._getframe(1)
    inside_module = False
    while frame is not None:
        if frame.f_code.co_filename.endswith(COMPILED_CALL):  # the first is the hook's compiler.disable
            if inside_module and not _is_disabled(frame):
                return True
        elif frame.f_code.co_filename != __file__:
            inside_module = True
        frame = frame.f_back
    return False


def _is_disabled(frame: FrameType) -> bool:
    """Whether a frame of torch.compile's calls is that of torch.compiler.disable. (Python 3.10 cannot tell.)"""
    return "DisableContext" in getattr(frame.f_code, "co_qualname", "")


class _ReadsMode(TorchFunctionMode):
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
