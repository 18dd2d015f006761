"""Loss scaling for float16: keeps gradients that float16 would round to zero, and skips steps that overflow.

A worker looks at the sum of all workers' gradients, which is the same on all, so all skip the same steps without
further communication. Where workers step alone (dist_local), each decides for itself. Nothing is copied from the
device. (Micikevicius et al. 2018, section 3.2.)"""

from __future__ import annotations

from typing import Any

import torch

FIRST = 2.0**16  # this and the next are the defaults of torch.amp.GradScaler
GROW_AFTER = 2000  # steps without overflow before the scale doubles


class LossScale:
    """Multiply the loss by `value`. The fused optimizer divides gradients by it, and skips a step that overflows."""

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self.value = torch.full((), FIRST, device=device)
        self._good_steps = torch.zeros((), device=device)
        _start_momentum(optimizer)
        optimizer.register_step_pre_hook(self._before_step)

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        gradients = [
            parameter.grad
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        overflowed = _overflowed(gradients)
        # Fused kernels read these two attributes. torch.amp.GradScaler sets them, too; no class declares them.
        optimizer.grad_scale = self.value.clone()  # type: ignore[attr-defined]
        optimizer.found_inf = overflowed.float()  # type: ignore[attr-defined]
        self._good_steps = torch.where(overflowed, 0.0, self._good_steps + 1)
        grow = self._good_steps >= GROW_AFTER
        factor = torch.where(overflowed, 0.5, torch.where(grow, 2.0, 1.0))
        self.value.mul_(factor)
        self._good_steps = torch.where(grow, 0.0, self._good_steps)

    def state(self) -> list[float]:
        return [self.value.item(), self._good_steps.item()]

    def load_state(self, state: list[float]) -> None:
        self.value.fill_(state[0])
        self._good_steps.fill_(state[1])


def _overflowed(gradients: list[torch.Tensor]) -> torch.Tensor:
    """Whether an element is not finite (), without a kernel for each gradient: the operator of torch.amp.GradScaler
    looks at all of a device, and leaves them as they are if it is to multiply them by 1. They may be memory that must
    not be written, so on a CPU, where it writes, each is asked."""
    if gradients[0].device.type == "cpu":
        return ~torch.stack([torch.isfinite(gradient).all() for gradient in gradients]).all()
    found, one = gradients[0].new_zeros(()), gradients[0].new_ones(())
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, one)
    return found.bool()


def _start_momentum(optimizer: torch.optim.Optimizer) -> None:
    """torch.optim.SGD allocates its buffers in the first step and leaves them unset if that step is skipped."""
    if isinstance(optimizer, torch.optim.SGD):
        for group in optimizer.param_groups:
            for parameter in group["params"] if group["momentum"] else ():
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
