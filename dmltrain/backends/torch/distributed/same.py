"""Checks what must be the same on all workers: a model's parameters, weights and buffers, and the number of steps."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from dmltrain.backends.torch.distributed.flat import memory_order
from dmltrain.base.errors import UserError
from dmltrain.kvstore import agreement
from dmltrain.kvstore.base import KVStore

CHUNK = 1 << 26  # bytes that are shared at once
EQUAL = 1e-4  # relative difference of norms that rounding may cause
_TRAINED = 1 << 49  # a flag above the 48 bits of a digest, in the same float64


def check(
    store: KVStore, named: Sequence[tuple[str, torch.nn.Parameter]], buffers: Sequence[tuple[str, torch.Tensor]]
) -> list[bool]:
    """Raise UserError unless all workers have parameters and buffers of the same names, shapes and types, and
    parameters of the same order in memory. Returns which parameters any worker trains."""
    for name, tensor in (*named, *buffers):
        _check_dense(name, tensor)
    shown = [_shown("parameter", name, parameter) + _lying(parameter) for name, parameter in named]
    shown += [_shown("buffer", *buffer) for buffer in buffers]
    counts = agreement.rows(store, "parameters of a model", [len(named), len(buffers)])
    if others := agreement.different(counts):
        sizes = [f"{row[0]:.0f} parameters and {row[1]:.0f} buffers" for row in (counts[0], counts[others[0]])]
        raise UserError(
            f"dmltrain.distribute: the model has {sizes[0]} on worker 0, but {sizes[1]} on worker {others[0]}: "
            "make the same model on all workers"
        )
    if not shown:
        return []
    own = [_digest(text) for text in shown]
    trained = [parameter.requires_grad for _, parameter in named] + [False] * len(buffers)
    row = [number + _TRAINED * wanted for number, wanted in zip(own, trained, strict=True)]
    table = agreement.rows(store, f"digests of a model's {len(row)}", row)
    digests, wants = table % _TRAINED, table >= _TRAINED
    for worker in agreement.different(digests):
        place = int(np.flatnonzero(digests[worker] != digests[0])[0])
        raise UserError(
            f"dmltrain.distribute: worker {worker} and worker 0 have different models: the first difference is {place} "
            f"in their order, which is {shown[place]} on worker {store.rank}; make the model in the same order on all "
            "workers (the order of a set differs between processes: use a list or sorted(...)), and with the same "
            "memory format"
        )
    return [bool(wanted) for wanted in wants.any(axis=0)[: len(named)]]


def _check_dense(name: str, tensor: torch.Tensor) -> None:
    if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
        raise UserError(f"{name} has no shape yet: run the model once, without gradients, before dmltrain.distribute")
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        raise UserError(
            f"{name} is no dense memory ({tensor.layout}, {tensor.dtype}, on device {tensor.device}): give the model a "
            "device before dmltrain.distribute, and keep sparse matrices in another attribute than a buffer"
        )


def share(store: KVStore, tensors: Iterable[torch.Tensor]) -> None:
    """Give all workers worker 0's values, in the same types. Tensors must be dense."""
    if store.num_workers == 1:
        return
    waiting: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        waiting.append(tensor)
        size += tensor.numel() * tensor.element_size()
        if size >= CHUNK:
            _share(store, waiting)
            waiting, size = [], 0
    if waiting:
        _share(store, waiting)


def _share(store: KVStore, tensors: list[torch.Tensor]) -> None:
    parts = [_bytes(tensor) for tensor in tensors]
    flat = np.concatenate([np.zeros(0, np.uint8), *parts])
    store.broadcast(flat, needed=store.rank != 0)
    if store.rank == 0:
        return
    bounds = np.cumsum([len(part) for part in parts])[:-1]
    with torch.no_grad():
        for tensor, part in zip(tensors, np.split(flat, bounds), strict=True):
            values = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            _bytes(values)[:] = part
            if not torch.equal(values, tensor.cpu()):  # a copy would change autograd's version of an equal tensor, too
                tensor.copy_(values)


def _bytes(tensor: torch.Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    whole = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    flat = whole.as_strided((whole.numel(),), (1,))  # also where it has no elements
    values: np.ndarray[tuple[int, ...], np.dtype[np.uint8]] = flat.view(torch.uint8).numpy()
    return values


def check_norms(store: KVStore, names: Sequence[str], norms: Sequence[float]) -> None:
    """Raise UserError unless all workers have gradients of about the same norms. All workers call this."""
    table = agreement.rows(store, f"norms of {len(norms)} gradients", norms)
    equal = np.isclose(table, table[0], rtol=EQUAL, atol=0.0, equal_nan=True).all(axis=0)
    for number in np.flatnonzero(~equal):
        raise UserError(
            f"the workers have replaced the gradient of {names[number]} after backward() by different ones: make it of "
            "what backward() left, which is the mean, or call optimizer.reduce_gradients() to average it"
        )


def _shown(kind: str, name: str, tensor: torch.Tensor) -> str:
    return f"{kind} {name}, {str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _lying(tensor: torch.Tensor) -> str:
    """The order of the dimensions in memory, in which gradients are sent; empty if it is the usual one."""
    order = memory_order(tensor)
    return "" if order == sorted(order) else f" with dimensions {order} from the outermost in memory"


def _digest(text: str) -> int:
    """48 bits, which a float64 holds beside another one."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "little")


def refuse_out_of_step(store: KVStore, own: Sequence[int]) -> None:
    """Raise UserError: workers have made unequal numbers of steps, or unequal numbers of changes to their models. All
    workers call this. `own`: this worker's numbers of steps and of changes."""
    table = agreement.rows(store, "steps of workers", own)
    others = agreement.different(table)
    worker = others[0] if others else store.rank
    (steps, calls), (steps_there, changes) = table[0], table[worker]
    difference = (
        f"worker 0 has made {steps:.0f} steps and worker {worker} {steps_there:.0f}"
        if steps != steps_there
        else f"worker 0 has changed its model or called distribute {calls:.0f} times, worker {worker} {changes:.0f}"
    )
    raise UserError(
        f"the workers are at different places of the script: {difference} before this backward(); skip steps and "
        "choose losses in the same way on all workers, by what they have in common (gradients after backward(), not "
        "the loss of one worker)"
    )
