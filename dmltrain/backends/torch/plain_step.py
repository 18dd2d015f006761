"""Steps of torch's optimizers without the import of torch.compile's machinery.

torch.optim marks the methods of its optimizers so that torch.compile does not trace them. For that it imports
torch._dynamo in every process that creates an optimizer, which takes as long as the import of torch itself, a second. A
process that compiles nothing needs neither the marks nor the import. (torch/_compile.py, _disable_dynamo;
torch/optim/optimizer.py, _use_grad_for_differentiable.)
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.profiler import record_function
from torch.optim import Optimizer
from torch.optim import optimizer as base

COMPILER = "torch._dynamo"
TORCH = os.path.dirname(torch.__file__)
MARKED = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")
MARK = "__dynamo_disable"  # torch's attribute of a method: what it calls instead
HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
GLOBAL_HOOKS = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")


def postpone_compiler() -> None:
    """From now on the methods of torch's optimizers do not import torch.compile's machinery themselves; they use it
    after something else has imported it. No effect with a version of torch that marks the methods in another way."""
    for name in MARKED:
        plain = getattr(getattr(Optimizer, name), "__wrapped__", None)
        if plain is not None and not hasattr(plain, MARK):
            setattr(plain, MARK, _until_compiling(name, plain))


def _until_compiling(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    def call(optimizer: Optimizer, *arguments: Any, **named: Any) -> Any:
        if COMPILER not in sys.modules:
            return plain(optimizer, *arguments, **named)
        with contextlib.suppress(AttributeError):  # another thread was faster
            if getattr(plain, MARK) is call:
                delattr(plain, MARK)  # torch marks the method itself
        return getattr(Optimizer, name)(optimizer, *arguments, **named)

    return call


def is_possible(optimizer: Optimizer) -> bool:
    """Whether `step` does the same as the optimizer's own `step()`: no hook, scheduler or gradient scaler changes the
    step of this object, and the step itself need not be differentiable."""
    own_step = vars(optimizer).get("step")
    if own_step is not None and not hasattr(own_step, "_wrapped_by_lr_sched"):  # this wrapper only counts calls
        return False
    hooks = [getattr(optimizer, name) for name in HOOKS] + [getattr(base, name, {}) for name in GLOBAL_HOOKS]
    scaled = any(getattr(optimizer, name, None) is not None for name in ("grad_scale", "found_inf"))
    return not (any(hooks) or scaled or optimizer.defaults.get("differentiable")) and _plain(optimizer) is not None


def step(optimizer: Optimizer) -> None:
    """Make a step of an optimizer for which `is_possible` is true. Profiles show its usual name."""
    optimizer._opt_called = True  # type: ignore[attr-defined]  # for the schedulers' warning about the order of calls
    plain = _plain(optimizer)
    assert plain is not None  # see is_possible
    with _named(f"Optimizer.step#{type(optimizer).__name__}.step"), torch.no_grad():
        plain(optimizer)


def _named(name: str) -> contextlib.AbstractContextManager[Any]:
    """This name in profiles. Without a profiler it costs nothing."""
    profiling = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
    return record_function(name) if profiling else contextlib.nullcontext()


def _plain(optimizer: Optimizer) -> Callable[..., Any] | None:
    """The class's step without torch's wrappers; None if another program has wrapped it."""
    function: Callable[..., Any] = type(optimizer).step
    while inner := getattr(function, "__wrapped__", None):
        if not function.__code__.co_filename.startswith(TORCH):
            return None
        function = inner
    return function
